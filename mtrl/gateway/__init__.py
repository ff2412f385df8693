"""An OpenAI-compatible server in front of an engine: agents that are programs of their own play episodes through it."""
