"""Programs with a loop of their own that play episodes, and ask the policy over HTTP."""
