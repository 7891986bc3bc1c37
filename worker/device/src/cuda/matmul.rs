//! Matrix products by cuBLASLt: the algorithm for each shape is chosen once, by the library's guess or by the clock.
//!
//! cuBLASLt counts columns first, so a row-major product is asked for as its transpose: the operands change places.
mod asked;
mod desc;
mod search;

use super::binding::{
    Address, Algorithm, Blas, Handle, Heuristic, LEAST_ALIGNMENT, MOST_WORKSPACE, NOT_SUPPORTED, R_BF16,
    R_E4M3, R_E5M2, R_F16, R_F32,
};
use super::card::Card;
use super::error::{CudaError, Result};
use super::libs::{Places, Wanted};
use crate::fp8::Fp8;
use crate::mem::Dtype;
pub(super) use asked::Asked;
use asked::Open;
use desc::{Desc, Own, Preference, check};
use search::Search;
use std::{
    collections::HashMap,
    ffi::c_int,
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Bytes that a product may use beside its operands.
pub const WORKSPACE: usize = 32 << 20;
/// Alignment above which no algorithm gains, bytes.
const MOST_ALIGNED: u64 = 256;

/// One operand: where it lies and how its rows follow one another in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Matrix {
    pub(super) at: Address,
    /// Elements from row to row as it is stored.
    pub(super) stride: usize,
    /// Stored with rows and columns exchanged.
    pub(super) transposed: bool,
}

/// `c[m, n] (=|+=) a[m, k] · b[k, n] (+ bias[n])`, all row-major unless transposed.
#[derive(Clone, Copy, Debug, PartialEq)]
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Inputs {
    Same(Dtype),
    /// Of each its kind, and where on the card its scale lies. Both lie along the sum: `a` as it is, `b` transposed.
    Fp8([(Fp8, Address); 2]),
}

impl Product {
    /// What decides which algorithm is best.
    fn key(&self) -> Key {
        let [a, b] = self.inputs.types();
        Key {
            sizes: [self.m, self.n, self.k, self.a.stride, self.b.stride, self.c.stride],
            transposed: [self.a.transposed, self.b.transposed],
            types: [a, b, type_of(self.output)],
            add: self.add,
            alignments: [self.a.at, self.b.at, self.c.at].map(alignment),
            bias: self.bias.map(alignment),
        }
    }

    /// For people: `product 8192 × 4096 × 1024 (bf16 · bf16 → f32)`.
    pub(super) fn describe(&self) -> String {
        let name = |which| match which {
            R_F16 => "f16",
            R_BF16 => "bf16",
            R_E4M3 => "e4m3",
            R_E5M2 => "e5m2",
            _ => "f32",
        };
        let ([a, b], c) = (self.inputs.types().map(name), name(type_of(self.output)));
        let rest = if self.add { ", added" } else { "" };
        format!("product {} × {} × {} ({a} · {b} → {c}{rest})", self.m, self.n, self.k)
    }

    fn own(&self) -> Own {
        Own { scales: self.inputs.scales(), bias: self.bias }
    }
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

/// An open cuBLASLt.
pub(super) struct Products {
    open: Arc<Open>,
    pub(super) path: PathBuf,
    pub(super) version: usize,
    /// None: the library has no algorithm for it.
    chosen: Mutex<HashMap<Key, Option<Arc<Chosen>>>>,
    /// Algorithms are timed, not guessed.
    search: OnceLock<Search>,
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
        let open = Arc::new(Open { library, handle });
        Ok(Products { open, path, version, chosen: Mutex::default(), search: OnceLock::new() })
    }

    /// From now on the fastest algorithm for each product is found by the clock, and kept in `folder` for other processes.
    pub(super) fn time_algorithms(&self, card: &Card, folder: Option<PathBuf>) {
        self.search.get_or_init(|| Search::new(folder, &card.facts, self.version));
    }

    /// Puts the product on the card's stream. `m`, `n` and `k` are above 0.
    pub(super) fn run(&self, card: &Arc<Card>, p: &Product) -> Result<()> {
        card.enter()?; // the choice is made for the thread's card
        let chosen = self.chosen(card, p)?.ok_or_else(|| {
            let said = format!("no algorithm for {p:?}");
            CudaError::Call { what: "cublasLtMatmulAlgoGetHeuristic".to_owned(), code: NOT_SUPPORTED, said }
        })?;
        // Given back in the stream's order, after this product.
        let workspace = card.scratch(chosen.workspace.max(1))?;
        let asked = Asked { open: self.open.clone(), product: *p, chosen, workspace: workspace.at() };
        let now = asked.clone();
        card.ask(|piece| piece.product(asked), |stream| now.issue(stream))
    }

    /// Has the library an algorithm for this product?
    pub(super) fn suits(&self, card: &Arc<Card>, p: &Product) -> Result<bool> {
        card.enter()?;
        Ok(self.chosen(card, p)?.is_some())
    }

    fn chosen(&self, card: &Arc<Card>, p: &Product) -> Result<Option<Arc<Chosen>>> {
        let key = p.key();
        let mut all = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chosen) = all.get(&key) {
            return Ok(chosen.clone());
        }
        let chosen = self.choose(card, p, &key)?.map(Arc::new);
        all.insert(key, chosen.clone());
        Ok(chosen)
    }

    fn choose(&self, card: &Arc<Card>, p: &Product, key: &Key) -> Result<Option<Chosen>> {
        let lt = &self.open.library;
        let mut chosen = Chosen {
            library: lt.clone(),
            desc: Desc::new(lt, key.transposed, p.own())?,
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
        let candidates = self.candidates(&chosen, key)?;
        let Some(first) = candidates.first() else { return Ok(None) };
        let best = match self.search.get() {
            None => *first,
            Some(search) => {
                let time = |candidate: &Heuristic| self.time(card, p, &chosen, candidate);
                search.fastest(&format!("{key:?}"), &candidates, time)?
            }
        };
        (chosen.algorithm, chosen.workspace) = (best.algorithm, best.workspace);
        Ok(Some(chosen))
    }

    /// What the library suggests, best guess first.
    fn candidates(&self, chosen: &Chosen, key: &Key) -> Result<Vec<Heuristic>> {
        let (lt, what) = (&self.open.library, "cublasLtMatmulAlgoGetHeuristic");
        let preference = Preference::new(lt)?;
        preference.set(MOST_WORKSPACE, &(WORKSPACE as u64).to_ne_bytes())?;
        let [a, b, c] = key.alignments;
        for (which, bytes) in (LEAST_ALIGNMENT..).zip([b, a, c, c]) {
            preference.set(which, &bytes.to_ne_bytes())?;
        }
        let asked = if self.search.get().is_some() { search::CANDIDATES } else { 1 };
        let (mut all, mut found) = (vec![Heuristic::default(); asked], 0);
        let [first, second, result] = chosen.layouts;
        // SAFETY: room for as many results as are asked for.
        let code = unsafe {
            (lt.cublasLtMatmulAlgoGetHeuristic)(
                self.open.handle,
                chosen.desc.handle,
                first,
                second,
                result,
                result,
                preference.handle,
                asked as c_int,
                all.as_mut_ptr(),
                &mut found,
            )
        };
        if code == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check(lt, what, code)?;
        all.truncate(usize::try_from(found).unwrap_or(0));
        all.retain(|one| one.state == 0 && one.workspace <= WORKSPACE);
        Ok(all)
    }

    /// Seconds that some runs of a product take by this algorithm; none if it can't, or there is no room to try. What the result
    /// held is as before where it is added to, else unspecified.
    fn time(
        &self,
        card: &Arc<Card>,
        p: &Product,
        chosen: &Chosen,
        candidate: &Heuristic,
    ) -> Result<Option<f64>> {
        let elements = (p.m - 1) * p.c.stride + p.n;
        let room = |bytes| card.allocate(bytes).ok();
        let sums = room(if p.add { elements * p.output.size() } else { 0 });
        let (Some(sums), Some(workspace)) = (sums, room(candidate.workspace.max(1))) else { return Ok(None) };
        let there = Product { c: Matrix { at: if p.add { sums.at() } else { p.c.at }, ..p.c }, ..*p };
        let algorithm = (&candidate.algorithm, workspace.at(), candidate.workspace);
        let call = |stream| self.open.call(stream, &there, &chosen.desc, chosen.layouts, algorithm);
        let run = || card.in_turn(call).is_ok_and(|code| code == 0);
        if !run() {
            return Ok(None);
        }
        let begin = card.record_timed()?;
        if !(0..search::RUNS).all(|_| run()) {
            return Ok(None);
        }
        let end = card.record_timed()?;
        end.wait()?;
        end.since(&begin)
    }
}
