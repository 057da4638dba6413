"""Other people's interfaces: pyrevolve, checkpoint_schedules, MPI, Dask."""
