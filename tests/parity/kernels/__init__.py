"""Kernels of upstream that no training channel uses: they keep the recorded numbers checkable."""
