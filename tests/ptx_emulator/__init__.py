"""A GPU in numpy: the PTX that Triton compiles, executed thread by thread, where there is no GPU.

The interpreter runs what a kernel says; this runs what the compiler made of it: layouts, swizzled shared memory,
asynchronous copies, matrix instructions, lines of assembly, bfloat16. Far too slow for anything but tests, and silent
about time. What is not the program's is caught: accesses outside of the tensors that a kernel was given, misaligned
ones, shared memory that is read before it is written, barriers that some threads miss.

``program``  PTX read into blocks of instructions
``lanes``    the state of all threads that run together
``scalar``   instructions of one thread; ``warp``: of several; ``copies``: asynchronous ones; ``matrix``: products
``memory``   global memory, which is that of this process, and shared memory
``machine``  a launch
``driver``   the machine as Triton's driver
"""
