"""An OpenAI-compatible server in front of an engine, through which separate agent programs run episodes."""
