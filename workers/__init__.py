"""Worker pods: a pair of engines over one memory service, elected by a file lock."""
