"""What the commands print and draw. May import everything of the planner."""
