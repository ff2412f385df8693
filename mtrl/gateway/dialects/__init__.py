"""The APIs that the gateway speaks: one module for each, with the form of its requests, answers, streams and errors."""
