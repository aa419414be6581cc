"""GLSL compute shaders, and the toolchain that compiles them to SPIR-V."""
