"""Programs of the build: images, wheels, checks, and the simulated autoscaler."""
