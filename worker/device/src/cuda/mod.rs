//! The backend for NVIDIA GPUs.
//!
//! No toolkit is needed to build it and none to run it but CUDA's libraries, which are found on the machine that has the card
//! ([`libs`]). Kernels are compiled for exactly that card when they are first needed and kept on disk ([`compile`]). All work
//! of a backend goes through one stream: ops return before they are done, in the order of the calls.
//!
//! An op can't return an error. What goes wrong on the card stops the worker with one message; with asynchronous work that
//! may be a call later than the one that caused it.
mod activation;
mod attention;
mod binding;
mod card;
mod classifier;
mod compile;
mod error;
mod flat;
mod libs;
mod matmul;
mod norm;
mod ops;
mod rows;

pub use card::Facts;
pub use error::{CudaError, Result};
pub use libs::{Found, Places, Wanted};

use crate::mem::{Buf, Dtype, Memory as Home, View, ViewMut};
use binding::Address;
use card::{Card, Launch, Memory, Param};
use compile::{Kernels, Nvrtc, Source};
use matmul::Products;
use std::{ffi::CStr, path::PathBuf, sync::Arc};

/// Ops on one card.
pub struct Cuda {
    card: Arc<Card>,
    kernels: Kernels,
    products: Products,
}

/// What was found and opened for a card, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// NVRTC's version and path.
    pub compiler: ((u32, u32), PathBuf),
    /// cuBLASLt's version (130100 is 13.1.0) and path.
    pub blas: (usize, PathBuf),
}

impl Home for Card {
    fn take_back(&self, address: u64, _: usize) {
        self.free(address);
    }
}

impl Cuda {
    /// Opens card `index` of those that this process is shown, with every library that training needs. Compiled kernels are
    /// kept in `cache`.
    pub fn open(places: &Places, index: usize, cache: Option<PathBuf>) -> Result<Cuda> {
        let card = Card::open(places, index)?;
        let kernels = Kernels::new(Nvrtc::open(places)?, &card, cache)?;
        card.enter()?;
        let products = Products::open(places)?;
        Ok(Cuda { card, kernels, products })
    }

    /// The card.
    pub fn facts(&self) -> &Facts {
        &self.card.facts
    }

    /// The libraries.
    pub fn libraries(&self) -> Libraries {
        let nvrtc = self.kernels.nvrtc();
        Libraries {
            compiler: (nvrtc.version, nvrtc.path.clone()),
            blas: (self.products.version, self.products.path.clone()),
        }
    }

    /// Free and total bytes of the card's memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.card.memory()
    }

    /// Name and architecture, for the log: `NVIDIA H100 80GB HBM3, sm_90`.
    pub fn describe(&self) -> String {
        format!("{}, {}", self.card.facts.name, self.card.facts.arch())
    }

    /// Compiles and loads every kernel now, so that no step waits for it.
    pub fn warm_up(&self) -> Result<()> {
        self.kernels.load_all(&self.card)
    }

    /// `len` zeros in the card's memory.
    pub fn zeroed(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let buf = self.unfilled(dtype, len)?;
        self.card.fill_zero(buf.view().address().0, len * dtype.size())?;
        Ok(buf)
    }

    /// A copy of a buffer or view of the host in the card's memory.
    pub fn upload(&self, from: View) -> Result<Buf> {
        let buf = self.unfilled(from.dtype(), from.len())?;
        self.card.upload(buf.view().address().0, from.bytes())?;
        Ok(buf)
    }

    /// A copy of a part of the card's memory on the host, after all work before.
    pub fn download(&self, from: View) -> Result<Buf> {
        let mut buf = Buf::zeroed_as(from.dtype(), from.len());
        self.card.download(buf.view_mut().bytes(), address(from))?;
        Ok(buf)
    }

    /// Waits until everything that was asked for is done.
    pub fn wait(&self) -> Result<()> {
        self.card.wait()
    }

    fn unfilled(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let memory = self.card.allocate(len.saturating_mul(dtype.size()))?;
        Ok(Buf::on(self.card.clone(), memory.keep(), dtype, len))
    }

    // --- for the ops ------------------------------------------------------------------------------------------------

    /// Memory for the length of an op.
    fn scratch(&self, bytes: usize) -> Memory {
        must(self.card.allocate(bytes))
    }

    /// Numbers of the host, for the length of an op.
    fn numbers<T: bytemuck::Pod>(&self, numbers: &[T]) -> Memory {
        let memory = self.scratch(size_of_val(numbers));
        must(self.card.upload(memory.at(), bytemuck::cast_slice(numbers)));
        memory
    }

    /// Starts a kernel; a launch without blocks is none.
    fn launch(&self, source: Source, name: &'static CStr, shape: Launch, arguments: &[&dyn Param]) {
        if shape.grid.contains(&0) {
            return;
        }
        let function = must(self.kernels.get(&self.card, source, name, shape.shared));
        let name = name.to_str().unwrap_or("a kernel");
        // SAFETY: each op passes its kernel's arguments, views as long as its shape says.
        must(unsafe { self.card.launch(name, function, shape, arguments) });
    }

    /// A kernel over all elements of a flat vector.
    fn each(&self, source: Source, name: &'static CStr, len: usize, arguments: &[&dyn Param]) {
        const THREADS: usize = 256;
        let blocks = len.div_ceil(THREADS).min(self.card.facts.multiprocessors * 16) as u32;
        self.launch(
            source,
            name,
            Launch { grid: [blocks, 1, 1], block: [THREADS as u32, 1, 1], shared: 0 },
            arguments,
        );
    }

    /// A kernel with a block per row of about `width` elements.
    fn each_row(
        &self,
        source: Source,
        name: &'static CStr,
        rows: usize,
        width: usize,
        arguments: &[&dyn Param],
    ) {
        let threads = width.next_multiple_of(32).clamp(32, 256) as u32;
        let grid = [u32::try_from(rows).unwrap_or_else(|_| panic!("{name:?}: {rows} rows")), 1, 1];
        self.launch(source, name, Launch { grid, block: [threads, 1, 1], shared: 0 }, arguments);
    }
}

/// The images of all kernels for an architecture (`sm_90`), whatever card this machine has or lacks.
pub fn compile_all(places: &Places, arch: &str) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let nvrtc = Nvrtc::open(places)?;
    compile::SOURCES.iter().map(|source| Ok((source.file, nvrtc.compile(*source, arch)?))).collect()
}

/// What went wrong stops the worker, which says it.
#[track_caller]
fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|e| panic!("{e}"))
}

/// An argument in the card's memory with its type, as kernels take it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Tensor {
    at: Address,
    dtype: i64,
}

// SAFETY: struct Tensor of common.cuh.
unsafe impl Param for Tensor {}

impl Tensor {
    /// Not given.
    const NONE: Tensor = Tensor { at: 0, dtype: 0 };
}

impl From<View<'_>> for Tensor {
    #[track_caller]
    fn from(v: View) -> Self {
        Tensor { at: address(v), dtype: number(v.dtype()) }
    }
}

impl From<&ViewMut<'_>> for Tensor {
    #[track_caller]
    fn from(v: &ViewMut) -> Self {
        v.as_view().into()
    }
}

/// As common.cuh numbers the types.
fn number(dtype: Dtype) -> i64 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

#[track_caller]
fn address(v: View) -> Address {
    let (at, on_host) = v.address();
    assert!(!on_host || v.is_empty(), "a buffer in the host's memory is used as a GPU's");
    at
}

/// The address of a view of `f32`.
#[track_caller]
fn floats(v: View) -> Address {
    assert!(v.dtype() == Dtype::F32, "a buffer of {:?} is used as f32", v.dtype());
    address(v)
}

/// Stops the program when an argument doesn't have the length that the shape demands.
#[track_caller]
fn expect_len(op: &str, name: &str, len: usize, want: usize) {
    assert!(len == want, "{op}: {name} has {len} elements, the shape asks for {want}");
}
