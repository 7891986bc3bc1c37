//! A piece of a stream's work that isn't asked for yet: kernels with their arguments, products, fills and copies, in order.
use super::super::binding::{Address, KernelNode};
use super::super::card::{Card, Function, Launch, Param};
use super::super::dnn;
use super::super::error::Result;
use super::super::matmul::Asked;
use std::{
    ffi::{CStr, c_void},
    ops::Range,
    ptr,
};

/// One piece of work.
#[derive(Clone, PartialEq)]
enum Call {
    Kernel {
        name: &'static CStr,
        function: Function,
        shape: Launch,
        /// Of [`Piece::starts`].
        arguments: Range<usize>,
    },
    Product(Asked),
    Plan(dnn::Asked),
    Zeros {
        at: Address,
        bytes: usize,
    },
    Copy {
        to: Address,
        from: Address,
        bytes: usize,
    },
}

/// Calls in their order; equal pieces do the same work at the same places.
#[derive(Clone, Default, PartialEq)]
pub(in super::super) struct Piece {
    calls: Vec<Call>,
    /// Arguments of kernels, each from a word on.
    words: Vec<u64>,
    /// Where each of them begins.
    starts: Vec<usize>,
}

impl Piece {
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn clear(&mut self) {
        self.calls.clear();
        self.words.clear();
        self.starts.clear();
    }

    /// Adds a kernel with a copy of its arguments.
    ///
    /// # Safety
    /// As [`Card::launch`], when the piece is issued.
    pub(in super::super) unsafe fn kernel(
        &mut self,
        name: &'static CStr,
        function: Function,
        shape: Launch,
        given: &[&dyn Param],
    ) {
        let first = self.starts.len();
        for argument in given {
            let at = self.words.len();
            let bytes = size_of_val(*argument);
            self.starts.push(at);
            self.words.resize(at + bytes.div_ceil(8), 0);
            // SAFETY: the words have room for so many bytes; parameters have no padding, so all of theirs are there.
            unsafe {
                let from = ptr::from_ref::<dyn Param>(*argument).cast::<u8>();
                from.copy_to_nonoverlapping(self.words[at..].as_mut_ptr().cast(), bytes);
            }
        }
        let arguments = first..self.starts.len();
        self.calls.push(Call::Kernel { name, function, shape, arguments });
    }

    pub(in super::super) fn product(&mut self, asked: Asked) {
        self.calls.push(Call::Product(asked));
    }

    pub(in super::super) fn plan(&mut self, asked: dnn::Asked) {
        self.calls.push(Call::Plan(asked));
    }

    pub(in super::super) fn zeros(&mut self, at: Address, bytes: usize) {
        self.calls.push(Call::Zeros { at, bytes });
    }

    pub(in super::super) fn copy(&mut self, to: Address, from: Address, bytes: usize) {
        self.calls.push(Call::Copy { to, from, bytes });
    }

    /// Asks the card for all of it, call by call.
    pub(super) fn issue(&self, card: &Card) -> Result<()> {
        self.each(card, |_| ())
    }

    /// As [`Piece::issue`]; after each call `f` is told whether it was a kernel.
    pub(super) fn each(&self, card: &Card, mut f: impl FnMut(bool)) -> Result<()> {
        for call in &self.calls {
            match call {
                Call::Kernel { name, function, shape, arguments } => {
                    let mut pointers = self.pointers(arguments);
                    // SAFETY: promised when it was added.
                    unsafe { card.start(name, *function, *shape, &mut pointers, card.stream)? };
                }
                Call::Product(asked) => asked.issue(card.stream)?,
                Call::Plan(asked) => asked.issue(card.stream)?,
                Call::Zeros { at, bytes } => card.fill_now(*at, *bytes, card.stream)?,
                Call::Copy { to, from, bytes } => card.copy_now(*to, *from, *bytes, card.stream)?,
            }
            f(matches!(call, Call::Kernel { .. }));
        }
        Ok(())
    }

    fn pointers(&self, arguments: &Range<usize>) -> Vec<*mut c_void> {
        let start = |at: &usize| ptr::from_ref(&self.words[*at]).cast_mut().cast();
        self.starts[arguments.clone()].iter().map(start).collect()
    }

    /// The calls whose kernels have other arguments or another shape in `other`; none where the pieces differ in more than that.
    pub(super) fn changed(&self, other: &Piece) -> Option<Vec<usize>> {
        if self.calls.len() != other.calls.len()
            || self.starts != other.starts
            || self.words.len() != other.words.len()
        {
            return None;
        }
        let mut changed = Vec::new();
        for (i, pair) in self.calls.iter().zip(&other.calls).enumerate() {
            match pair {
                (
                    Call::Kernel { function, shape, arguments, .. },
                    Call::Kernel { function: f, shape: s, arguments: a, .. },
                ) if function == f && arguments == a => {
                    if shape != s || self.words_of(a) != other.words_of(a) {
                        changed.push(i);
                    }
                }
                (one, another) if one == another => {}
                _ => return None,
            }
        }
        Some(changed)
    }

    fn words_of(&self, arguments: &Range<usize>) -> &[u64] {
        let start = |i: usize| self.starts.get(i).copied().unwrap_or(self.words.len());
        &self.words[start(arguments.start)..start(arguments.end)]
    }

    /// Runs `f` with a kernel of the piece as a graph's nodes are described.
    pub(super) fn with_kernel<T>(&self, call: usize, f: impl FnOnce(&KernelNode) -> T) -> Option<T> {
        let Call::Kernel { function, shape, arguments, .. } = &self.calls[call] else { return None };
        let mut pointers = self.pointers(arguments);
        let node = KernelNode {
            function: function.0,
            grid: shape.grid,
            block: shape.block,
            shared: shape.shared as u32,
            arguments: pointers.as_mut_ptr(),
            extra: ptr::null_mut(),
            kernel: ptr::null_mut(),
            context: ptr::null_mut(),
        };
        Some(f(&node))
    }

    /// Of equal pieces the same, of others hardly ever.
    pub(super) fn hash(&self) -> u64 {
        let mut hash = self.likeness();
        for call in &self.calls {
            if let Call::Kernel { shape, .. } = call {
                mix(&mut hash, shape.grid.map(u64::from));
            }
        }
        mix(&mut hash, self.words.iter().copied());
        hash
    }

    /// The same of pieces that differ in no more than their kernels' arguments and shapes.
    pub(super) fn likeness(&self) -> u64 {
        let mut hash = self.calls.len() as u64;
        for call in &self.calls {
            match call {
                Call::Kernel { function, arguments, .. } => {
                    mix(&mut hash, [function.0.addr() as u64, arguments.end as u64]);
                }
                Call::Product(asked) => mix(&mut hash, asked.numbers()),
                Call::Plan(asked) => mix(&mut hash, asked.numbers()),
                Call::Zeros { at, bytes } => mix(&mut hash, [*at, *bytes as u64]),
                Call::Copy { to, from, bytes } => mix(&mut hash, [*to, *from, *bytes as u64]),
            }
        }
        hash
    }
}

fn mix(hash: &mut u64, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        *hash = (hash.rotate_left(5) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}
