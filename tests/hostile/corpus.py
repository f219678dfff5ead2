"""All hostile inputs. Every one of them is handed to the command line by ``test_corpus.py`` and ``measure.py``."""

from tests.hostile.comparisons import COMPARISONS
from tests.hostile.containers import CONTAINERS
from tests.hostile.file_system import FILE_SYSTEM
from tests.hostile.layouts import LAYOUTS
from tests.hostile.orbax import ORBAX_INPUTS
from tests.hostile.series import SERIES
from tests.hostile.states import STATES
from tests.hostile.witnesses import WITNESSES

CORPUS = (*COMPARISONS, *CONTAINERS, *LAYOUTS, *FILE_SYSTEM, *ORBAX_INPUTS, *SERIES, *STATES, *WITNESSES)
