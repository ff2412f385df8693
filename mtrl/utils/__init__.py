"""Small helpers without knowledge of training: text, files, numbers, processes, signals, HTTP clients and servers."""
