"""Batches of requests: files of them, the store on disk, and what answers them beside other requests."""
