"""Agents: programs that run episodes in their own loop and call the policy over HTTP."""
