//! What the worker asks of this machine about GPUs: where CUDA's libraries may lie, where compiled kernels are kept.
use contract::env;
use device::cuda::Places;
use std::path::PathBuf;

/// From the environment of this process.
pub(crate) fn places() -> Places {
    let all = |name: &str| -> Vec<PathBuf> {
        std::env::var_os(name).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
    };
    let paths = |names: &[&str]| -> Vec<PathBuf> {
        names.iter().filter_map(std::env::var_os).filter(|v| !v.is_empty()).map(PathBuf::from).collect()
    };
    Places {
        job: Vec::new(),
        library_path: all(env::LD_LIBRARY_PATH),
        python: paths(&[env::VIRTUAL_ENV, env::CONDA_PREFIX]),
        toolkits: paths(&[env::CUDA_HOME, env::CUDA_PATH]),
    }
}

/// Where compiled kernels are kept: nowhere on a machine without a home.
pub(crate) fn kernel_cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = set(env::XDG_CACHE_HOME).or_else(|| Some(set(env::HOME)?.join(".cache")))?;
    Some(cache.join("launch/kernels"))
}
