"""SEC: nothing in the checkpoint would run when somebody loads it the usual way."""

from __future__ import annotations

from auditor.invariants.invariant import Invariant, Needs
from auditor.model.catalog import FileState
from auditor.model.finding import Judgement, Location, Severity, Violation
from auditor.model.run import StepEvidence

_BUILTINS = frozenset({
    "eval", "exec", "execfile", "compile", "__import__", "open", "input", "getattr", "setattr", "delattr", "globals",
    "locals", "vars", "breakpoint", "apply", "map", "filter",
})  # fmt: skip
_MODULES = frozenset({
    "os", "posix", "nt", "posixpath", "ntpath", "sys", "subprocess", "commands", "importlib", "imp", "runpy", "pty",
    "shutil", "socket", "socketserver", "ctypes", "code", "codeop", "pickle", "_pickle", "cPickle", "marshal", "shelve",
    "webbrowser", "requests", "urllib", "urllib2", "http", "ftplib", "smtplib", "telnetlib", "asyncio",
    "multiprocessing", "signal", "tempfile", "pathlib", "glob", "timeit", "trace", "cProfile", "profile", "pdb", "bdb",
    "doctest", "venv", "ensurepip", "pip", "zipimport", "pkgutil", "operator", "functools", "types", "inspect", "gc",
    "weakref", "threading", "_thread", "linecache", "site", "sysconfig", "platform", "pydoc", "idlelib", "turtle",
})  # fmt: skip
_HARMLESS = frozenset({"pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.Path",
                       "functools.partial", "types.SimpleNamespace", "operator.itemgetter"})  # fmt: skip
_OTHERS = frozenset({"torch.load", "torch.hub.load", "torch.jit.load", "torch.storage._load_from_bytes",
                     "numpy.load", "numpy.testing._private.utils.runstring", "joblib.load", "dill.loads",
                     "cloudpickle.loads", "copyreg.add_extension"})  # fmt: skip


def dangerous(name: str) -> bool:
    """Whether calling the global ``name`` can run code, load code, or touch files and the network."""
    if name in _HARMLESS:
        return False
    module, _, attribute = name.rpartition(".")
    if module in ("builtins", "__builtin__"):
        return attribute in _BUILTINS
    return name in _OTHERS or module.split(".", 1)[0] in _MODULES


def nothing_would_run(evidence: StepEvidence) -> Judgement:
    """No pickle calls a global that is known to be dangerous."""
    catalog = evidence.catalog
    violations, num_holds = [], 0
    for file in catalog.files:
        calls = [name for name, _ in file.opaque if dangerous(name)]
        if calls:
            detail = f"would call {', '.join(calls[:4])} when loaded by an ordinary unpickler"
            location = Location(catalog.step, file.name, coordinate=file.coordinate, detail=detail)
            violations.append(
                Violation(catalog.within(file.name), (location,), f"{catalog.within(file.name)} {detail}")
            )
        else:
            num_holds += file.state is FileState.PRESENT
    return Judgement(num_holds, tuple(violations))


INVARIANTS = (
    Invariant(
        "SEC001", "dangerous-pickle", Severity.ERROR,
        statement="No pickle in the checkpoint calls a global that runs code, loads code, or touches files or network.",
        rationale="Loading it with torch.load(weights_only=False) or pickle runs whatever it names, as the user who "
                  "loads it. Nothing of it is run here.",
        source="Python documentation, pickle: `only unpickle data you trust`; picklescan's list, widened by importlib",
        example="mp_rank_00_model_states.pt would call posix.system when loaded by an ordinary unpickler",
        misses="Dangerous callables that are not on the list; unknown classes are counted and shown by `inspect`.",
        hint="Don't load this file. Find out who wrote it; restore it from a copy that you trust.",
        judge_step=nothing_would_run, needs=Needs.HEADERS,
    ),
)  # fmt: skip
