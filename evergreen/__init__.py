"""The core: what every program of Evergreen shares. `runtime` lies lowest, `serving` highest."""
