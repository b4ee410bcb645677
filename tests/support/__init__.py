"""What process tests share: real processes that are always ended, free ports, questions over HTTP."""
