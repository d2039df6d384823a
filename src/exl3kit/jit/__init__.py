"""Compilers: native code is built on the user's machine at first use and kept in the cache folder.

`cpu` builds every file of kernels/cpu with g++ into one shared library with a C ABI. Nothing is
ever written into the package folder; a damaged cache entry is a miss.
"""

from __future__ import annotations
