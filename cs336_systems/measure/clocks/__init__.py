"""How long things take: functions in turns (`timing`), a step's `phases`, steps of several `ranks`."""
