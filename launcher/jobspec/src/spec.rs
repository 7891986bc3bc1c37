//! [`JobSpec`](job::JobSpec) and its sections: the keys of job.yaml with their types, defaults and
//! documentation.
pub(crate) mod activation;
pub(crate) mod checkpoint;
pub(crate) mod cluster;
pub(crate) mod container;
pub(crate) mod data;
pub(crate) mod data_source;
pub(crate) mod environment;
pub(crate) mod experts;
pub(crate) mod families;
pub(crate) mod host_values;
pub(crate) mod job;
pub(crate) mod join;
pub(crate) mod lora;
pub(crate) mod model;
pub(crate) mod optimizer;
pub(crate) mod param_groups;
pub(crate) mod ports;
pub(crate) mod run;
pub(crate) mod run_values;
pub(crate) mod schedule;
pub(crate) mod signals;
pub(crate) mod slurm;
pub(crate) mod ssh;
pub(crate) mod train;
pub(crate) mod train_settings;
pub(crate) mod wrap;
