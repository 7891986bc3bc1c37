//! Memory of the emulated card, a card that fails, and one that is too old for fp8. One test: the card counts for the whole process.
mod card;

use device::{
    Cuda, Dtype, Ops, Storage,
    cuda::{CudaError, Places},
    needed_for,
    storage::Stopped,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn memory_goes_back_and_failures_have_names() {
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("CARD_MEMORY", (8 << 20).to_string()) };
    let places = Places { job: vec![card::folder().to_owned()], ..Places::default() };
    let cuda = Cuda::open(&places, 0, None).expect("the emulated card");
    let before = cuda.memory().expect("asked").0;
    let mut buf = cuda.zeroed(Dtype::Bf16, 1 << 20);
    assert_eq!(before - cuda.memory().expect("asked").0, 2 << 20);
    let too_much = || cuda.try_zeroed(Dtype::F32, 1 << 40).map(|_| ());
    let Err(e) = needed_for("the head", too_much) else { panic!("four TiB are there") };
    let text = e.to_string();
    assert!(matches!(e, CudaError::OutOfMemory { .. }), "{text}");
    assert!(text.contains("the head needs 4096.00 GiB more") && text.contains("batch.micro"), "{text}");
    // the next launch fails
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("CARD_FAILS", "cuLaunchKernel:1") };
    let panic =
        catch_unwind(AssertUnwindSafe(|| cuda.scale(buf.view_mut(), 2.0))).expect_err("a failed launch");
    let Stopped(text) = panic.downcast_ref().expect("a text");
    assert!(
        text.starts_with("cuLaunchKernel of scale") && text.contains("CUDA_ERROR_LAUNCH_FAILED"),
        "{text}"
    );
    // SAFETY: as above.
    unsafe { std::env::remove_var("CARD_FAILS") };
    drop(buf);
    // The pool keeps those 2 MiB, and this card's pool has no other use for them: they are given back for what doesn't fit beside.
    let large = cuda.try_zeroed(Dtype::F32, 7 << 18).expect("7 of 8 MiB");
    drop(large);
    assert!(cuda.try_zeroed(Dtype::F32, 9 << 18).is_err(), "9 of 8 MiB");
    assert_eq!(cuda.memory().expect("asked").0, before);
    for (told, fits) in [("80", false), ("90", true)] {
        // SAFETY: as above.
        unsafe { std::env::set_var("CARD_CAPABILITY", told) };
        let checked = Cuda::open(&places, 0, None).expect("the emulated card").check_fp8();
        let why = "GPU 0 (Emulated card) is sm_80; needed: sm_89 (Ada) or newer for products in fp8";
        assert_eq!(checked.map_err(|e| e.to_string()), if fits { Ok(()) } else { Err(why.to_owned()) });
    }
}
