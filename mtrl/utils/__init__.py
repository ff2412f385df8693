"""Small helpers without knowledge of training: text, files, numbers, processes, signals and HTTP serving."""
