"""Kernels for CPUs, written in LLVM's language and compiled for the CPU that they run on, where torch has no fast ones.

They serve where llvmlite is installed and torch has its threads from OpenMP; elsewhere torch's own products do.
"""
