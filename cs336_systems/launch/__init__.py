"""Starting processes that work together: `start` calls functions in them, `group` says which of them a process is."""
