"""Attention kernels over the paged KV pool: one typed op, one file per implementation."""
