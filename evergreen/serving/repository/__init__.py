"""Read and write Triton's model repository, in a folder or a bucket."""
