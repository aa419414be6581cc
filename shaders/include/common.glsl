// What every kernel may use. Core Vulkan 1.1 only: 32-bit words, no optional feature.

// [[unroll]]: wherever a loop indexes a local array, or the array ends up in memory instead of registers.
#extension GL_EXT_control_flow_attributes : require

// Workgroup number when the host spread a count over x and y (ops/op.py: spread).
#define WORKGROUP_INDEX (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x)

#define WORKGROUPS (gl_NumWorkGroups.x * gl_NumWorkGroups.y)

// fma() everywhere a product is accumulated: the compiler may contract a * b + c in one variant of a kernel and
// not in another, and then a row's result would depend on the batch it is in.
