"""A regular package, since smdebug_rulesconfig, which the SageMaker SDK brings, installs a `tests` of its own."""
