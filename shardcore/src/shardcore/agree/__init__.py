"""Before anything changes: all ranks report what they have, and any error or difference is raised on all of them."""
