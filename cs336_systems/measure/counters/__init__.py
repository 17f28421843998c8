"""What was counted: by a GPU's units (`ncu`), and bytes sent (`collectives`)."""
