"""A regular package, because smdebug_rulesconfig, a dependency of the SageMaker SDK, installs a package `tests`."""
