//! Reports the registers and the memory that each kernel uses, and how many of its blocks a
//! multiprocessor executes at once. Also reports the algorithms of matmuls.
use super::backend::Cuda;
use super::bindings::driver_sys::CUfunction_attribute;
use super::compile::list_kernel_names;
use super::error::Result;
use super::gpu::Gpu;
use super::launch::{KernelFunction, LaunchConfig};
use super::matmul::MatmulPlanReport;
use std::ffi::c_int;

/// The resources that a kernel uses: registers and memory per thread and block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Name of the kernel.
    pub name: String,
    /// Registers of each thread.
    pub registers: i32,
    /// Bytes of local memory of each thread, for arrays and spilled registers.
    pub local_bytes: i32,
    /// Bytes of static shared memory of each block.
    pub static_shared_bytes: i32,
    /// The largest number of threads of a block.
    pub max_threads: i32,
    /// The first launch of the kernel; `None` if it was not launched.
    pub launch: Option<LaunchReport>,
}

/// The launch configuration of a kernel, and how many of its blocks a multiprocessor executes at
/// once (occupancy).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchReport {
    /// Numbers of blocks.
    pub grid: [u32; 3],
    /// Numbers of threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of each block.
    pub shared_bytes: usize,
    /// How many such blocks a multiprocessor executes at once.
    pub active_blocks: i32,
}

impl Cuda {
    /// Returns the resources (registers, memory) that every kernel of this crate uses on this GPU.
    /// Compiles and loads all kernels first.
    pub fn report_kernel_resources(&self) -> Result<Vec<KernelReport>> {
        let mut reports = Vec::new();
        for (source, name) in list_kernel_names() {
            let function = self.kernels.find_function(&self.gpu, source, &name)?;
            reports.push(query_kernel_resources(&self.gpu, &name.to_string_lossy(), function, None)?);
        }
        Ok(reports)
    }

    /// Returns the resources (registers, memory, occupancy) of each kernel that was launched so
    /// far, with the configuration of its first launch.
    pub fn report_launched_kernel_resources(&self) -> Result<Vec<KernelReport>> {
        let describe = |(name, function, config): &(String, KernelFunction, LaunchConfig)| {
            query_kernel_resources(&self.gpu, name, *function, Some(*config))
        };
        self.kernels.list_launched_functions().iter().map(describe).collect()
    }

    /// Returns, for each matmul that was requested so far, the algorithm by which cuBLASLt computes
    /// the matmul.
    pub fn report_matmul_plans(&self) -> Vec<MatmulPlanReport> {
        self.cublas_lt.describe_plans()
    }

    /// Returns the kernel sources that this process has compiled, each with the seconds that NVRTC
    /// needed. Sources whose compiled kernels were cached are not listed.
    pub fn kernel_compile_seconds(&self) -> Vec<(&'static str, f64)> {
        self.kernels.compile_seconds()
    }
}

/// Queries from the driver which resources (registers, memory) a kernel uses.
fn query_kernel_resources(
    gpu: &Gpu,
    name: &str,
    function: KernelFunction,
    config: Option<LaunchConfig>,
) -> Result<KernelReport> {
    use CUfunction_attribute::*;
    gpu.make_current()?;
    let query = |attribute| {
        let mut value: c_int = 0;
        // SAFETY: writes one integer; the function lives as long as the context.
        unsafe { gpu.driver.cuFuncGetAttribute(&mut value, attribute, function.0) }.map(|()| value)
    };
    let launch = config.map(|LaunchConfig { grid, block, shared }| {
        let (mut active_blocks, threads) = (0, block.iter().product::<u32>() as c_int);
        // SAFETY: writes one integer; the function lives as long as the context.
        unsafe {
            gpu.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut active_blocks,
                function.0,
                threads,
                shared,
            )
        }
        .map(|()| LaunchReport { grid, block, shared_bytes: shared, active_blocks })
    });
    Ok(KernelReport {
        name: name.to_owned(),
        registers: query(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        local_bytes: query(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        static_shared_bytes: query(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        max_threads: query(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        launch: launch.transpose()?,
    })
}
