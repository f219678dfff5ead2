"""The frozen words of the field: dtype, region, mesh, placement, catalog, observation, finding. No I/O."""
