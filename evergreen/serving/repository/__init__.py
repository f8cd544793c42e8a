"""Triton's model repository, in a folder or a bucket: its files, lock, versions and configuration."""
