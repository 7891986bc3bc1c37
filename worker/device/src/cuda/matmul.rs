//! Matrix products by cuBLASLt: the algorithm for each shape is chosen once.
//!
//! cuBLASLt counts columns first, so a row-major product is asked for as its transpose: the operands change places.
use super::binding::{
    Address, Algorithm, BIAS, Blas, COMPUTE_F32, EPILOGUE, Handle, Heuristic, LEAST_ALIGNMENT, MOST_WORKSPACE,
    R_BF16, R_E4M3, R_E5M2, R_F16, R_F32, SCALE_A, SCALE_B, TRANSPOSE_A, TRANSPOSE_B, WITH_BIAS,
};
use super::card::Card;
use super::error::{CudaError, Result};
use super::libs::{Places, Wanted};
use crate::fp8::Fp8;
use crate::mem::Dtype;
use std::{
    collections::HashMap,
    ffi::{CStr, c_int, c_void},
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes that a product may use beside its operands.
pub const WORKSPACE: usize = 32 << 20;
/// Alignment above which no algorithm gains, bytes.
const MOST_ALIGNED: u64 = 256;

/// One operand: where it lies and how its rows follow one another in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) at: Address,
    /// Elements from row to row as it is stored.
    pub(super) stride: usize,
    /// Stored with rows and columns exchanged.
    pub(super) transposed: bool,
}

/// `c[m, n] (=|+=) a[m, k] · b[k, n] (+ bias[n])`, all row-major unless transposed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: Matrix,
    pub(super) b: Matrix,
    pub(super) c: Matrix,
    pub(super) inputs: Inputs,
    pub(super) output: Dtype,
    pub(super) add: bool,
    /// Of the output's type.
    pub(super) bias: Option<Address>,
}

/// What both operands' elements are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Inputs {
    Same(Dtype),
    /// Of each its kind, and where on the card its scale lies. Both lie along the sum: `a` as it is, `b` transposed.
    Fp8([(Fp8, Address); 2]),
}

impl Inputs {
    fn types(self) -> [c_int; 2] {
        match self {
            Inputs::Same(dtype) => [type_of(dtype); 2],
            Inputs::Fp8(operands) => operands.map(|(kind, _)| match kind {
                Fp8::E4M3 => R_E4M3,
                Fp8::E5M2 => R_E5M2,
            }),
        }
    }

    fn scales(self) -> Option<[Address; 2]> {
        match self {
            Inputs::Same(_) => None,
            Inputs::Fp8(operands) => Some(operands.map(|(_, scale)| scale)),
        }
    }
}

/// What an algorithm is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 6],
    transposed: [bool; 2],
    /// Of `a`, `b`, `c`.
    types: [c_int; 3],
    add: bool,
    alignments: [u32; 3],
    /// Of the bias, where there is one.
    bias: Option<u32>,
}

/// What is kept of a shape: its descriptions and the chosen algorithm.
struct Chosen {
    library: Arc<Blas>,
    desc: Desc,
    /// Of cuBLASLt's first and second operand and the result.
    layouts: [Handle; 3],
    algorithm: Algorithm,
    workspace: usize,
}

// SAFETY: descriptions are only read once they are made.
unsafe impl Send for Chosen {}
// SAFETY: as above.
unsafe impl Sync for Chosen {}

impl Drop for Chosen {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: made by this library, destroyed once.
            let _ = unsafe { (self.library.cublasLtMatrixLayoutDestroy)(layout) };
        }
    }
}

/// What lies elsewhere in each product, and is in its description: scales of the operands, a bias.
#[derive(Clone, Copy)]
struct Own {
    scales: Option<[Address; 2]>,
    bias: Option<Address>,
}

impl Own {
    fn of(p: &Product) -> Self {
        Own { scales: p.inputs.scales(), bias: p.bias }
    }

    fn is_there(self) -> bool {
        self.scales.is_some() || self.bias.is_some()
    }
}

/// How operands are multiplied, and by what.
struct Desc {
    library: Arc<Blas>,
    handle: Handle,
}

impl Desc {
    /// Of a product with these operands transposed, each pair in the order `a`, `b`.
    fn new(library: &Arc<Blas>, transposed: [bool; 2], own: Own) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (library.cublasLtMatmulDescCreate)(&mut handle, COMPUTE_F32, R_F32) };
        let desc = Desc { library: library.clone(), handle };
        check(library, "cublasLtMatmulDescCreate", code)?;
        for (which, transposed) in [(TRANSPOSE_A, transposed[1]), (TRANSPOSE_B, transposed[0])] {
            desc.set(which, &c_int::from(transposed).to_ne_bytes())?;
        }
        if let Some(bias) = own.bias {
            desc.set(EPILOGUE, &WITH_BIAS.to_ne_bytes())?;
            desc.set(BIAS, &bias.to_ne_bytes())?;
        }
        for (which, scale) in own.scales.into_iter().flat_map(|[a, b]| [(SCALE_A, b), (SCALE_B, a)]) {
            desc.set(which, &scale.to_ne_bytes())?;
        }
        Ok(desc)
    }

    fn set(&self, which: c_int, value: &[u8]) -> Result<()> {
        let (at, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: as many bytes as are said.
        let code = unsafe { (self.library.cublasLtMatmulDescSetAttribute)(self.handle, which, at, len) };
        check(&self.library, "cublasLtMatmulDescSetAttribute", code)
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by this library, destroyed once.
            let _ = unsafe { (self.library.cublasLtMatmulDescDestroy)(self.handle) };
        }
    }
}

/// An open cuBLASLt.
pub(super) struct Products {
    library: Arc<Blas>,
    handle: Handle,
    pub(super) path: PathBuf,
    pub(super) version: usize,
    chosen: Mutex<HashMap<Key, Arc<Chosen>>>,
}

// SAFETY: the handle may be used by several threads at once (cuBLASLt keeps no state in it).
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtDestroy)(self.handle) };
    }
}

fn type_of(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F32 => R_F32,
        Dtype::F16 => R_F16,
        Dtype::Bf16 => R_BF16,
    }
}

fn alignment(at: Address) -> u32 {
    (1u64 << at.trailing_zeros().min(63)).min(MOST_ALIGNED) as u32
}

/// The library's version (`13.1.0`) and path. Nothing is made on a card.
pub(super) fn version(places: &Places) -> Result<(String, PathBuf)> {
    let found = places.open(Wanted::Blas)?;
    let path = found.path.clone();
    let library = Blas::of(found)?;
    // SAFETY: no conditions.
    let version = unsafe { (library.cublasLtGetVersion)() };
    Ok((format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100), path))
}

impl Products {
    /// The card's context must be the thread's.
    pub(super) fn open(places: &Places) -> Result<Products> {
        let found = places.open(Wanted::Blas)?;
        let path = found.path.clone();
        let library = Arc::new(Blas::of(found)?);
        let mut handle = ptr::null_mut();
        // SAFETY: no conditions.
        let version = unsafe { (library.cublasLtGetVersion)() };
        // SAFETY: one handle is written.
        check(&library, "cublasLtCreate", unsafe { (library.cublasLtCreate)(&mut handle) })?;
        Ok(Products { library, handle, path, version, chosen: Mutex::default() })
    }

    /// Puts the product on the card's stream. `m`, `n` and `k` are above 0.
    pub(super) fn run(&self, card: &Arc<Card>, p: &Product) -> Result<()> {
        card.enter()?; // the choice is made for the thread's card
        let chosen = self.chosen(p)?;
        // What is kept is other threads', too.
        let own = Own::of(p);
        let own = own
            .is_there()
            .then(|| Desc::new(&self.library, [p.a.transposed, p.b.transposed], own))
            .transpose()?;
        let desc = own.as_ref().unwrap_or(&chosen.desc);
        let workspace = card.allocate(chosen.workspace.max(1))?;
        let (one, beta) = (1.0f32, if p.add { 1.0f32 } else { 0.0 });
        let scalar = |x: &f32| ptr::from_ref(x).cast::<c_void>();
        let [first, second, result] = chosen.layouts;
        // SAFETY: the descriptions say how large the operands are; the caller checked that the views are as large. The
        // workspace is given back in the stream's order, after this product.
        let code = unsafe {
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
                &chosen.algorithm,
                workspace.at(),
                chosen.workspace,
                card.stream(),
            )
        };
        check(&self.library, "cublasLtMatmul", code)
    }

    fn chosen(&self, p: &Product) -> Result<Arc<Chosen>> {
        let [a, b] = p.inputs.types();
        let key = Key {
            sizes: [p.m, p.n, p.k, p.a.stride, p.b.stride, p.c.stride],
            transposed: [p.a.transposed, p.b.transposed],
            types: [a, b, type_of(p.output)],
            add: p.add,
            alignments: [p.a.at, p.b.at, p.c.at].map(alignment),
            bias: p.bias.map(alignment),
        };
        let mut all = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chosen) = all.get(&key) {
            return Ok(chosen.clone());
        }
        let chosen = Arc::new(self.choose(&key, Own::of(p))?);
        all.insert(key, chosen.clone());
        Ok(chosen)
    }

    fn choose(&self, key: &Key, own: Own) -> Result<Chosen> {
        let lt = &self.library;
        let mut chosen = Chosen {
            library: lt.clone(),
            desc: Desc::new(lt, key.transposed, own)?,
            layouts: [ptr::null_mut(); 3],
            algorithm: Algorithm::default(),
            workspace: 0,
        };
        let [m, n, k, a, b, c] = key.sizes;
        let stored = |rows, columns, transposed| if transposed { (columns, rows) } else { (rows, columns) };
        let shapes = [
            (stored(n, k, key.transposed[1]), b, key.types[1]),
            (stored(k, m, key.transposed[0]), a, key.types[0]),
            ((n, m), c, key.types[2]),
        ];
        for (layout, ((rows, columns), stride, dtype)) in chosen.layouts.iter_mut().zip(shapes) {
            // SAFETY: one handle is written.
            let code = unsafe {
                (lt.cublasLtMatrixLayoutCreate)(layout, dtype, rows as u64, columns as u64, stride as i64)
            };
            check(lt, "cublasLtMatrixLayoutCreate", code)?;
        }
        let best = self.best(&chosen, key)?;
        (chosen.algorithm, chosen.workspace) = (best.algorithm, best.workspace);
        Ok(chosen)
    }

    fn best(&self, chosen: &Chosen, key: &Key) -> Result<Heuristic> {
        let lt = &self.library;
        let preference = Preference::new(lt)?;
        preference.set(MOST_WORKSPACE, &(WORKSPACE as u64).to_ne_bytes())?;
        let [a, b, c] = key.alignments;
        for (which, bytes) in (LEAST_ALIGNMENT..).zip([b, a, c, c]) {
            preference.set(which, &bytes.to_ne_bytes())?;
        }
        let (mut best, mut found) = (Heuristic::default(), 0);
        let [first, second, result] = chosen.layouts;
        // SAFETY: room for one result is said and given.
        let code = unsafe {
            (lt.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                chosen.desc.handle,
                first,
                second,
                result,
                result,
                preference.handle,
                1,
                &mut best,
                &mut found,
            )
        };
        check(lt, "cublasLtMatmulAlgoGetHeuristic", code)?;
        check(lt, "cublasLtMatmulAlgoGetHeuristic", best.state)?;
        if found < 1 || best.workspace > WORKSPACE {
            let said = format!("no algorithm for {key:?}");
            return Err(CudaError::Call { what: "cublasLtMatmulAlgoGetHeuristic".to_owned(), code, said });
        }
        Ok(best)
    }
}

struct Preference<'a> {
    library: &'a Blas,
    handle: Handle,
}

impl<'a> Preference<'a> {
    fn new(library: &'a Blas) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut handle) };
        check(library, "cublasLtMatmulPreferenceCreate", code)?;
        Ok(Preference { library, handle })
    }

    fn set(&self, which: c_int, value: &[u8]) -> Result<()> {
        // SAFETY: as many bytes as are said.
        let code = unsafe {
            (self.library.cublasLtMatmulPreferenceSetAttribute)(
                self.handle,
                which,
                value.as_ptr().cast(),
                value.len(),
            )
        };
        check(self.library, "cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}

fn check(library: &Blas, what: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: a text that never ends to live, or null.
    let said = unsafe {
        let at = (library.cublasLtGetStatusString)(code);
        if at.is_null() {
            "an unknown error".into()
        } else {
            CStr::from_ptr(at).to_string_lossy().into_owned()
        }
    };
    Err(CudaError::Call { what: what.to_owned(), code, said })
}
