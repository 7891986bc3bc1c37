//! CUDA graphs on the emulated card: the same numbers, fewer calls, and what happens where they fail. One test: the card counts, and
//! is told to fail, for the whole process.
#[path = "card/calls.rs"]
mod calls;
mod card;

use calls::calls;
use device::{Buf, Cuda, Dtype, Ops, Storage, cuda::Places, ops::Write, parity, storage::Said};
use std::time::Duration;

fn cuda() -> Cuda {
    let places = Places { job: vec![card::folder().to_owned()], ..Places::default() };
    Cuda::open(&places, 0, None).expect("the emulated card")
}

/// Some buffers, and a step that changes them: kernels, a list, products with scratch memory, a fill and a copy.
struct Work<'a> {
    cuda: &'a Cuda,
    all: [Buf; 4],
}

impl<'a> Work<'a> {
    fn new(cuda: &'a Cuda) -> Self {
        let all = [1.0f32, -0.5, 0.25, 2.0].map(|x| {
            let mut buf = cuda.zeroed(Dtype::F32, 64);
            cuda.offset(buf.view_mut(), x);
            buf
        });
        Work { cuda, all }
    }

    fn step(&mut self, factor: f32, tokens: &[u32; 8]) {
        let (cuda, [x, y, w, z]) = (self.cuda, &mut self.all);
        cuda.embedding_forward(y.view_mut(), x.view(), tokens, 8);
        cuda.matmul_forward(z.view_mut(), y.view(), w.view(), 8, 8, 8, Write::Add);
        cuda.scale(z.view_mut(), 0.5);
        cuda.add(x.view_mut(), z.view());
        cuda.softcap(x.view_mut(), 3.0);
        cuda.clear(y.view_mut());
        cuda.copy(y.view_mut().slice(0..8), z.view().slice(8..16));
        cuda.bias_backward(w.view_mut().slice(0..8), y.view(), 8, 8); // with scratch memory
        cuda.scale(w.view_mut(), factor);
    }

    fn bits(&self) -> Vec<u32> {
        let all = self.all.iter().map(|buf| self.cuda.downloaded(buf.view()));
        all.flat_map(|buf| buf.host().iter().map(|x| x.to_bits()).collect::<Vec<_>>()).collect()
    }
}

const STEPS: u32 = 6;

/// The tokens of a step, another list each time.
fn tokens(step: u32) -> [u32; 8] {
    std::array::from_fn(|i| (i as u32 * 5 + step * 3) % 8)
}

/// The bits after some steps, the last factor changing with each of them or not.
fn run(cuda: &Cuda, changing: bool) -> Vec<u32> {
    let mut work = Work::new(cuda);
    for step in 0..STEPS {
        work.step(if changing { 0.5 + step as f32 } else { 0.75 }, &tokens(step));
        cuda.wait();
    }
    work.bits()
}

#[test]
fn graphs_do_what_the_calls_would_have_done() {
    let plain = [false, true].map(|changing| run(&cuda(), changing));
    the_same_numbers_by_fewer_calls(&plain);
    memory_that_goes_back_was_used();
    scratch_memory_grows_behind_what_uses_it();
    work_that_never_comes_again_is_no_graph();
    few_arguments_are_changed();
    graphs_are_few();
    failures_leave_the_work_right(&plain);
    the_clock_decides();
    let cuda = cuda();
    cuda.use_graphs(true);
    let rows = parity::run(&cuda, 1, 2);
    assert!(rows.iter().all(|row| row.failed.is_none() && row.worst.f32 < 1e-3), "{rows:#?}");
}

fn the_same_numbers_by_fewer_calls(plain: &[Vec<u32>; 2]) {
    let cuda = cuda();
    cuda.use_graphs(true);
    assert_eq!(run(&cuda, false), plain[0]);
    assert_eq!(run(&cuda, true), plain[1], "an argument that changes");
    let mut work = Work::new(&cuda);
    for step in 0..3 {
        work.step(0.75, &tokens(step));
        cuda.wait();
    }
    let asked = || ["cuLaunchKernel", "cuMemsetD8Async", "cuMemAllocAsync", "cuMemFreeAsync"].map(calls);
    let (before, launches, known) = (asked(), calls("cuGraphLaunch"), cuda.replayed());
    for step in 3..3 + STEPS {
        work.step(0.75, &tokens(step));
        cuda.wait();
    }
    assert_eq!(asked(), before, "nothing is asked for but graphs");
    assert_eq!(calls("cuGraphLaunch") - launches, i64::from(STEPS));
    let now = cuda.replayed();
    assert_eq!((now.on, now.kept, now.plain), (true, known.kept, known.plain));
    assert_eq!(now.calls - known.calls, u64::from(STEPS) * 10, "calls of a step");
    // Off again: call by call, and the same numbers go on.
    let mut beside = Work::new(&cuda);
    cuda.use_graphs(false);
    (0..3 + STEPS).for_each(|step| beside.step(0.75, &tokens(step)));
    assert_eq!(beside.bits(), work.bits());
    assert_eq!(cuda.replayed().kept, 0);
    assert_eq!(calls("cuGraphExecDestroy"), calls("cuGraphInstantiate"), "all are given back");
}

/// What waits is done before memory that it uses goes back, and before anybody looks at its results.
fn memory_that_goes_back_was_used() {
    let cuda = cuda();
    cuda.use_graphs(true);
    let mut sum = cuda.zeroed(Dtype::F32, 64);
    for step in 1..=STEPS {
        let mut other = cuda.zeroed(Dtype::F32, 64);
        cuda.offset(other.view_mut(), 1.5);
        for _ in 0..4 {
            cuda.add(sum.view_mut(), other.view());
        }
        drop(other);
        cuda.offset(sum.view_mut(), 1.0);
        let mark = cuda.mark();
        cuda.in_own_stream(&mut || {
            mark.follow();
            let copy = cuda.copied(sum.view());
            assert_eq!(cuda.downloaded(copy.view()).host(), [7.0 * step as f32; 64]);
        });
    }
}

/// Scratch memory that becomes larger: what waits is done with the smaller one.
fn scratch_memory_grows_behind_what_uses_it() {
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("CARD_LAG", "main:10") }; // or new memory may be where the old one was
    let [plain, by_graphs] = [false, true].map(|graphs| {
        let cuda = cuda();
        cuda.use_graphs(graphs);
        let Work { all: [x, y, ..], .. } = &mut Work::new(&cuda);
        let mut wide = [1.0, 2.0].map(|by| {
            let mut buf = cuda.zeroed(Dtype::F32, 9000);
            cuda.offset(buf.view_mut(), by);
            buf
        });
        let [to, from] = &mut wide;
        cuda.bias_backward(x.view_mut().slice(0..8), y.view(), 8, 8);
        cuda.bias_backward(to.view_mut(), from.view(), 1, 9000);
        [x, to].map(|buf| cuda.downloaded(buf.view()).host().to_vec())
    });
    // SAFETY: as above; both cards are closed.
    unsafe { std::env::remove_var("CARD_LAG") };
    assert_eq!(by_graphs, plain);
}

fn work_that_never_comes_again_is_no_graph() {
    let cuda = cuda();
    cuda.use_graphs(true);
    let made = calls("cuGraphInstantiate");
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    for step in 0..40u16 {
        (0..6u16).for_each(|call| cuda.offset(buf.view_mut(), f32::from(6 * step + call)));
        cuda.wait();
    }
    assert_eq!(cuda.downloaded(buf.view()).host(), [(0..240).sum::<u16>().into(); 8]);
    assert_eq!((calls("cuGraphInstantiate"), cuda.replayed().kept), (made, 0));
}

/// A graph of a piece in which one argument is another each time is one graph.
fn few_arguments_are_changed() {
    let expected = run(&cuda(), true);
    let cuda = cuda();
    cuda.use_graphs(true);
    let (launched, changed) = (calls("cuLaunchKernel"), calls("cuGraphExecKernelNodeSetParams"));
    assert_eq!(run(&cuda, true), expected);
    let found = cuda.replayed();
    assert_eq!((found.kept, found.changed), (1, u64::from(STEPS) - 2), "{found:?}");
    assert_eq!(calls("cuGraphExecKernelNodeSetParams") - changed, i64::from(STEPS) - 2);
    assert!(calls("cuLaunchKernel") - launched < 30, "{}", calls("cuLaunchKernel") - launched);
}

/// Pieces that come twice and never again: graphs don't pile up, and after a while no more are made.
fn graphs_are_few() {
    let cuda = cuda();
    cuda.use_graphs(true);
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    let mut most = 0;
    for piece in 0..1300u16 {
        for _ in 0..2 {
            (0..4u16).for_each(|call| cuda.scale(buf.view_mut(), f32::from(4 * piece + call)));
            cuda.wait();
        }
        most = most.max(cuda.replayed().kept);
    }
    assert_eq!(most, 512);
    assert!(cuda.replayed().launches < 600, "{:?}", cuda.replayed());
    drop((buf, cuda));
    assert_eq!(calls("cuGraphExecDestroy"), calls("cuGraphInstantiate"), "all are given back");
}

fn failures_leave_the_work_right(plain: &[Vec<u32>; 2]) {
    for (fails, said) in [
        ("cuStreamBeginCapture:1", "cuStreamBeginCapture failed: CUDA_ERROR_LAUNCH_FAILED"),
        ("cuStreamEndCapture:1", "cuStreamEndCapture failed"),
        ("cuGraphInstantiate:1", "cuGraphInstantiate failed"),
        ("cuGraphLaunch:1", "cuGraphLaunch failed"),
        ("cuGraphLaunch:3", "cuGraphLaunch failed"),
        ("cuGraphExecKernelNodeSetParams:2", "cuGraphExecKernelNodeSetParams failed"),
        ("captured product", "cublasLtMatmul failed"),
    ] {
        let cuda = cuda();
        cuda.use_graphs(true);
        let changing = fails.contains("SetParams");
        let expected = &plain[usize::from(changing)];
        // SAFETY: no other thread runs.
        unsafe { std::env::set_var("CARD_FAILS", fails) };
        assert_eq!(run(&cuda, changing), *expected, "{fails}");
        // SAFETY: as above.
        unsafe { std::env::remove_var("CARD_FAILS") };
        assert!(!cuda.replayed().on, "{fails}");
        let Some(Said::Failed(why)) = cuda.step_took(Duration::ZERO) else {
            panic!("{fails}: it isn't said")
        };
        assert!(why.starts_with("CUDA graphs are off") && why.contains(said), "{fails}: {why}");
        assert_eq!(cuda.step_took(Duration::ZERO), None, "once");
        assert_eq!(run(&cuda, changing), *expected, "{fails}, afterwards");
        drop(cuda);
        assert_eq!(calls("cuGraphDestroy"), calls("cuGraphInstantiate"), "{fails}");
    }
}

fn the_clock_decides() {
    for (calls, with, text) in [
        (100, 3, "CUDA graphs are on: a step takes 3.00 ms with them, 5.00 ms without"),
        (100, 7, "are off: a step takes 7.00 ms with them"),
        (20, 3, "are off: the GPU works 250 µs for each of its calls"),
    ] {
        let cuda = cuda();
        let mut buf = cuda.zeroed(Dtype::F32, 8);
        cuda.try_graphs();
        let mut said = Vec::new();
        for _ in 0..60 {
            (0..calls).for_each(|_| cuda.scale(buf.view_mut(), 1.0));
            let ms = if cuda.replayed().on { with } else { 5 };
            said.extend(cuda.step_took(Duration::from_millis(ms)));
        }
        assert!(matches!(&said[..], [Said::Found(said)] if said.contains(text)), "{said:?}");
        assert_eq!(cuda.replayed().on, text.contains("are on"));
    }
}
