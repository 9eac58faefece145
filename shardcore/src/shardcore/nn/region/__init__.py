"""Where activations enter the part of a block in which they are split over ``tp``."""
