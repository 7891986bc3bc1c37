//! The diagnostic codes (names with explanations) of errors about GPUs, CPUs and their libraries,
//! such as `gpu-not-found`.

codes! {
    GPU_NOT_FOUND: Cluster = "gpu-not-found" {
        summary: "The NVIDIA driver does not show the GPU that was assigned to this process.",
        cause: "The machine has fewer GPUs than the job uses, CUDA_VISIBLE_DEVICES hides them, or a container was started without GPUs.",
        remedy: "Compare the output of `nvidia-smi` with the job's cluster section, then run `launch check`.",
    }
    GPU_UNSUPPORTED: Cluster = "gpu-unsupported" {
        summary: "The GPU lacks a feature that the job needs.",
        cause: "Training needs memory pools and compute capability 8.0 (Ampere), and with fp8 8.9 (Ada). Some virtual GPUs have no memory pools.",
        remedy: "Run the job on a newer GPU, or choose another `train.precision`.",
    }
    GPU_OUT_OF_MEMORY: Failed = "gpu-out-of-memory" {
        summary: "An allocation did not fit into the GPU's memory.",
        cause: "Parameters, optimizer states and activations of this rank take more than the GPU has, or another process uses the GPU.",
        remedy: "Lower `train.batch.micro` or `train.data.seq_len`, set `train.recompute: block`, or raise `train.zero.stage` or the number of GPUs. `launch plan` estimates the memory.",
    }
    DEVICE_LIBRARY_MISSING: Cluster = "device-library-missing" {
        summary: "A CUDA library was not found on this machine.",
        cause: "The NVIDIA driver or the CUDA libraries are not installed, or are in a directory that was not searched.",
        remedy: "Install the driver or the libraries, or name their directory in `cluster.cuda_library_paths`.",
    }
    DEVICE_LIBRARY_UNUSABLE: Cluster = "device-library-unusable" {
        summary: "A CUDA library was found but cannot be used.",
        cause: "The dynamic loader rejected the file, or the library needs a newer driver than this machine has.",
        remedy: "Install a version of the library that fits the driver, or name its directory in `cluster.cuda_library_paths`.",
    }
    DEVICE_LIBRARY_TOO_OLD: Cluster = "device-library-too-old" {
        summary: "A CUDA library or the NVIDIA driver is too old.",
        cause: "launch needs CUDA 12.0, cuDNN 9.10 for attention, and an NVRTC that knows the GPU's architecture.",
        remedy: "Upgrade the library, or name the directory of a newer one in `cluster.cuda_library_paths`.",
    }
    GPU_RESULT_DIFFERS: Failed = "gpu-result-differs" {
        summary: "The result of an operation on the GPU differs from the result on the CPU.",
        cause: "A defect of the GPU, its driver, a CUDA library or one of launch's own kernels.",
        remedy: "Run `launch gpu-check` on another GPU of the same kind, try other library versions, and report the failing operation.",
    }
    CUDA_CALL_FAILED: Failed = "cuda-call-failed" {
        summary: "A function of the CUDA driver or of a CUDA library failed.",
        cause: "The GPU or its driver reported an error, or earlier work on the GPU failed and the error surfaced in this call.",
        remedy: "Look for Xid messages in the kernel log (`dmesg`), and run `launch gpu-check` on this host.",
    }
    KERNEL_COMPILE_FAILED: Failed = "kernel-compile-failed" {
        summary: "NVRTC rejected one of launch's own kernels.",
        cause: "This version of NVRTC does not accept the source of the kernel. The field `compiler_log` contains the messages of the compiler.",
        remedy: "Install another version of NVRTC, and report the compiler's messages.",
    }
    KERNEL_CACHE_NOT_WRITABLE: Failed = "kernel-cache-not-writable" {
        summary: "A compiled kernel could not be written to the kernel cache.",
        cause: "The cache directory is full, read-only or owned by another user.",
        remedy: "Make $XDG_CACHE_HOME/launch/kernels (default ~/.cache/launch/kernels) writable. Until then every process compiles the kernels again.",
    }
    CUDA_GRAPHS_DISABLED: Failed = "cuda-graphs-disabled" {
        summary: "CUDA graphs were turned off because the driver failed to build or launch one.",
        cause: "The driver or a library does not support capturing one of the calls.",
        remedy: "Nothing is required: training continues without CUDA graphs. Set `train.cuda_graphs: false` so that training does not try CUDA graphs.",
    }
    CUDNN_ATTENTION_UNSUPPORTED: Failed = "cudnn-attention-unsupported" {
        summary: "`train.attention` is `cudnn`, and cuDNN cannot compute this attention.",
        cause: "cuDNN supports bf16, heads of up to 128 elements in multiples of 8, one document per sequence, no attention dropout and no softcap.",
        remedy: "Set `train.attention: auto`, which uses launch's own kernels in this case.",
    }
    CUDNN_PLAN_REJECTED: Failed = "cudnn-plan-rejected" {
        summary: "cuDNN is not used for an attention shape because no execution plan of cuDNN passed the checks.",
        cause: "cuDNN offers no plan for the shape, a plan failed, or the results of a plan differ from those of launch's own kernels.",
        remedy: "Nothing is required: launch's own kernels are used for this shape.",
    }
}
