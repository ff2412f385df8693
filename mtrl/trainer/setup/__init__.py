"""The parts of a run, made from the configuration: models, engine, warm start."""
