//! Every name of the environment that we read or set, in one place (N11).

/// Set for every worker: global rank.
pub const RANK: &str = "RANK";
/// Set for every worker: rank on its node.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Set for every worker: number of workers of the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Set for every worker: number of workers on its node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Set for every worker: address of rank 0's node.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Set for every worker: a TCP port on that node.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Set for every worker: threads it may use.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
/// Built-in worker: number of the inherited descriptor of the socket to its agent.
pub const LAUNCH_CONTROL_FD: &str = "LAUNCH_CONTROL_FD";
/// Built-in worker: number of the inherited descriptor of the node's shared memory segment (a memfd).
pub const LAUNCH_SHM_FD: &str = "LAUNCH_SHM_FD";
/// Testing: `RANK:N` — the worker of that rank kills itself at its N-th fault point (docs/testing.md).
pub const LAUNCH_FAULT: &str = "LAUNCH_FAULT";
/// Testing: a file to which every worker appends the number of fault points it has passed.
pub const LAUNCH_FAULT_COUNT: &str = "LAUNCH_FAULT_COUNT";
/// Read: any value but an empty one turns colour off (https://no-color.org).
pub const NO_COLOR: &str = "NO_COLOR";
