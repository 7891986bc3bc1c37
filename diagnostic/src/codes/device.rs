//! Codes of errors about GPUs, CPUs and their libraries.

codes! {
    DEVICE_LIBRARY_MISSING: Cluster = "device-library-missing" {
        summary: "A CUDA library was not found on this machine.",
        cause: "The NVIDIA driver or the CUDA libraries are not installed, or are in a directory that was not searched.",
        remedy: "Install them, or name their directory in cluster.cuda_library_paths.",
    }
}
