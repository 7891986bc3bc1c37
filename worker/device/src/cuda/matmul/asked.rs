//! A product that is asked for: now, or with the piece of work that it is part of.
use super::super::binding::{Address, Algorithm, Blas, Handle};
use super::super::error::Result;
use super::desc::{Desc, check};
use super::{Chosen, Product};
use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Arc,
};

/// The library, opened.
pub(super) struct Open {
    pub(super) library: Arc<Blas>,
    pub(super) handle: Handle,
}

// SAFETY: the handle may be used by several threads at once (cuBLASLt keeps no state in it).
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtDestroy)(self.handle) };
    }
}

impl Open {
    /// The library's answer to one product: what algorithm, where it has its workspace, how many bytes.
    pub(super) fn call(
        &self,
        stream: Handle,
        p: &Product,
        desc: &Desc,
        [first, second, result]: [Handle; 3],
        (algorithm, workspace, bytes): (&Algorithm, Address, usize),
    ) -> c_int {
        let (one, beta) = (1.0f32, if p.add { 1.0f32 } else { 0.0 });
        let scalar = |x: &f32| ptr::from_ref(x).cast::<c_void>();
        // SAFETY: the descriptions say how large the operands are; the caller checked that the views are as large. The
        // workspace is given back in the stream's order, after this product.
        unsafe {
            (self.library.cublasLtMatmul)(
                self.handle,
                desc.handle,
                scalar(&one),
                p.b.at,
                first,
                p.a.at,
                second,
                scalar(&beta),
                p.c.at,
                result,
                p.c.at,
                result,
                algorithm,
                workspace,
                bytes,
                stream,
            )
        }
    }
}

/// A product with everything that it needs.
#[derive(Clone)]
pub(in super::super) struct Asked {
    pub(super) open: Arc<Open>,
    pub(super) product: Product,
    pub(super) chosen: Arc<Chosen>,
    pub(super) workspace: Address,
}

impl PartialEq for Asked {
    fn eq(&self, other: &Self) -> bool {
        self.product == other.product
            && self.workspace == other.workspace
            && Arc::ptr_eq(&self.chosen, &other.chosen)
    }
}

impl Asked {
    /// Puts it on a stream.
    pub(in super::super) fn issue(&self, stream: Handle) -> Result<()> {
        let Asked { open, product, chosen, workspace } = self;
        // What is kept is other threads', too.
        let own = product.own();
        let transposed = [product.a.transposed, product.b.transposed];
        let own = own.is_there().then(|| Desc::new(&open.library, transposed, own)).transpose()?;
        let desc = own.as_ref().unwrap_or(&chosen.desc);
        let algorithm = (&chosen.algorithm, *workspace, chosen.workspace);
        let code = open.call(stream, product, desc, chosen.layouts, algorithm);
        check(&open.library, "cublasLtMatmul", code)
    }

    /// What tells it from most others.
    pub(in super::super) fn numbers(&self) -> [u64; 6] {
        let Product { m, n, a, b, c, .. } = self.product;
        [m as u64, n as u64, a.at, b.at, c.at, self.workspace]
    }
}
