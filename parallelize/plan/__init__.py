"""The planner: which layouts fit a number of devices, with their memory and time (docs/plan.md)."""
