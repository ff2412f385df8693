"""Models behind a chat API: the client, the budget of requests and the engine."""
