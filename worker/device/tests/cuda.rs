//! The CUDA backend on the emulated card: results beside the CPU's, finding libraries, the kernel cache.
mod card;

use device::cuda::{self, CudaError, Places};
use device::ops::Write;
use device::{Buf, Cuda, Dtype, Ops, Storage, View, parity};
use std::sync::OnceLock;

/// Only the emulated libraries.
fn places() -> Places {
    Places { job: vec![card::folder().to_owned()], ..Places::default() }
}

fn cuda() -> &'static Cuda {
    static CUDA: OnceLock<Cuda> = OnceLock::new();
    CUDA.get_or_init(|| Cuda::open(&places(), 0, None).expect("the emulated card"))
}

#[test]
fn every_op_is_the_cpus() {
    let rows = parity::run(cuda(), 1, 5);
    assert_eq!(rows.len(), 11);
    assert!(rows.iter().all(|row| row.failed.is_none() && row.shapes >= 5), "{rows:#?}");
    // Rounding is seen: the 16-bit cases were 16 bits wide. Only the embedding rounds nothing.
    let rounded = rows.iter().filter(|row| row.worst.bf16 > row.worst.f16 && row.worst.f16 > row.worst.f32);
    assert_eq!(rounded.count(), 10, "{rows:#?}");
    // Only a real card may sum products of fp8 less exactly.
    let fp8 = rows.iter().find(|row| row.what == "products in fp8").expect("the card has fp8");
    assert!(fp8.worst.f32 < 1e-5, "{fp8:?}");
}

fn to_host(from: View) -> Vec<f32> {
    let mut wide = cuda().zeroed(Dtype::F32, from.len());
    cuda().cast(wide.view_mut(), from);
    cuda().downloaded(wide.view()).host().to_vec()
}

/// The values as this type keeps them.
fn through(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    let wide = cuda().copied(values.into());
    let mut buf = cuda().zeroed(dtype, values.len());
    cuda().cast(buf.view_mut(), wide.view());
    to_host(buf.view())
}

/// Nothing to do is nothing done, also where a launch without blocks would be an error.
#[test]
fn empty_shapes() {
    let poisoned = cuda().copied((&[f32::NAN; 12][..]).into());
    let (mut none, mut dw) = (cuda().zeroed(Dtype::F32, 0), poisoned);
    let (none2, w) = (cuda().zeroed(Dtype::F32, 0), cuda().zeroed(Dtype::F32, 12));
    cuda().matmul_forward(none.view_mut(), none2.view(), w.view(), 0, 3, 4, Write::Set);
    cuda().matmul_backward_weight(dw.view_mut(), none2.view(), none2.view(), 0, 3, 4, Write::Set);
    cuda().add(none.view_mut(), none2.view());
    cuda().embedding_forward(none.view_mut(), w.view(), &[], 4);
    cuda().norm_blocks(&mut [], none2.view());
    cuda().swiglu_forward(none.view_mut(), none2.view(), 0, 7);
    assert_eq!(to_host(dw.view()), [0.0; 12]);
}

#[test]
fn casts_round_to_the_nearest_even() {
    let values = [
        1.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        -3.0e38,
        3.4e38,
        65504.0,
        65519.9,
        65520.0,
        6.0e-8,
        2.0e-8,
        -0.0,
        f32::INFINITY,
    ];
    let bf16 = through(Dtype::Bf16, &values);
    let f16 = through(Dtype::F16, &values);
    assert_eq!(bf16[..3], [1.0, 1.0, 1.015625]);
    assert!(bf16[4].is_infinite() && bf16[11].is_infinite() && through(Dtype::Bf16, &[f32::NAN])[0].is_nan());
    assert_eq!(f16[5..8], [65504.0, 65504.0, f32::INFINITY]);
    assert_eq!((f16[8], f16[9], f16[10].to_bits()), (2f32.powi(-24), 0.0, (-0.0f32).to_bits()));
    assert!(through(Dtype::F16, &[f32::NAN])[0].is_nan());
}

#[test]
fn a_machine_without_a_gpu_says_what_was_looked_for_and_where() {
    let empty = tempfile::tempdir().expect("a folder");
    let places = Places { library_path: vec![empty.path().to_owned()], ..Places::default() };
    match Cuda::open(&places, 0, None).map(|_| ()) {
        Err(e @ CudaError::NotFound { .. }) => {
            let text = e.to_string();
            let folder = empty.path().display().to_string();
            for part in
                ["the NVIDIA driver", "libcuda.so.1", &folder, "/usr/local/nvidia/lib64", "nvidia-smi"]
            {
                assert!(text.contains(part), "{part} is missing in: {text}");
            }
        }
        other => eprintln!("this machine has a driver: {other:?}"),
    }
    // A driver and nothing else: the compiler is what is missing.
    std::os::unix::fs::symlink(card::folder().join("libcuda.so.1"), empty.path().join("libcuda.so.1"))
        .expect("a link");
    if let Err(CudaError::NotFound { what, .. }) = Cuda::open(&places, 0, None).map(|_| ()) {
        assert!(what.starts_with("NVRTC"), "{what}");
    }
}

#[test]
fn what_was_found_is_told() {
    let facts = cuda().facts();
    assert_eq!(
        (facts.name.as_str(), facts.arch().as_str(), facts.driver),
        ("Emulated card", "sm_90", (13, 0))
    );
    let libraries = cuda().libraries();
    assert_eq!((libraries.compiler.0, libraries.blas.0), ((13, 0), 130_100));
    assert_eq!(libraries.blas.1, card::folder().join("libcublasLt.so.13"));
    let Err(e) = Cuda::open(&places(), 3, None).map(|_| ()) else { panic!("there is no such card") };
    assert_eq!(e.to_string(), "there is no GPU 3: the driver sees 1, counted from 0");
}

#[test]
fn compiled_kernels_are_kept() {
    let cache = tempfile::tempdir().expect("a folder");
    let open = || Cuda::open(&places(), 0, Some(cache.path().join("kernels"))).expect("opened");
    open().warm_up().expect("compiled");
    let files = || {
        let mut names: Vec<_> = std::fs::read_dir(cache.path().join("kernels"))
            .expect("kept")
            .map(|e| e.expect("entry").path())
            .collect();
        names.sort();
        names
    };
    let kept = files();
    assert_eq!(kept.len(), 8, "{kept:?}");
    for file in &kept {
        std::fs::write(file, "damaged").expect("written");
    }
    open().warm_up().expect("compiled again");
    assert_eq!(files(), kept);
    assert!(kept.iter().all(|f| std::fs::metadata(f).expect("there").len() > 48));
}

/// The emulated library suggests a slow algorithm, a quick one, and one that refuses.
#[test]
fn the_fastest_algorithm_is_found_and_kept() {
    let cache = tempfile::tempdir().expect("a folder");
    let multiply = |write| {
        let cuda = Cuda::open(&places(), 0, Some(cache.path().to_owned())).expect("opened");
        cuda.time_products();
        let mut buffers = [1.0f32, 2.0, 3.0].map(|x| {
            let mut buf = cuda.zeroed(Dtype::F32, 64);
            cuda.offset(buf.view_mut(), x);
            buf
        });
        let [y, x, w] = &mut buffers;
        cuda.matmul_forward(y.view_mut(), x.view(), w.view(), 8, 8, 8, write);
        cuda.downloaded(y.view()).host().to_vec()
    };
    let chosen = || {
        let files = std::fs::read_dir(cache.path()).expect("kept").map(|e| e.expect("entry").path());
        let of_products = files.filter(|f| f.extension().is_some_and(|e| e == "algorithm"));
        of_products.map(|f| (std::fs::read(&f).expect("read"), f)).collect::<Vec<_>>()
    };
    assert_eq!(multiply(Write::Set), [48.0; 64]);
    let [(bytes, file)] = &chosen()[..] else { panic!("one choice: {:?}", chosen()) };
    let which = u64::from_ne_bytes(bytes[48 + 5 * 8..][..8].try_into().expect("eight bytes"));
    assert_eq!(which, 1, "the quick one");
    // A file that isn't whole, or names what isn't suggested, is made anew.
    for damaged in [&bytes[..60], b"", &[0; 112]] {
        std::fs::write(file, damaged).expect("written");
        assert_eq!(multiply(Write::Set), [48.0; 64]);
        assert_eq!(std::fs::read(file).expect("read"), *bytes);
    }
    // Timing leaves what is added to as it was.
    assert_eq!(multiply(Write::Add), [49.0; 64]);
    assert_eq!(chosen().len(), 2);
}

/// A library may have no algorithm for 16-bit operands in odd places, or none that adds a bias: then they go other ways.
#[test]
fn products_that_the_library_lacks() {
    for lacks in ["", "odd"] {
        let mut child = std::process::Command::new(std::env::current_exe().expect("our own path"));
        child
            .args(["odd_products", "--exact", "--nocapture"])
            .env("BLAS_LACKS", lacks)
            .env("ODD_PRODUCTS", "1");
        let output = child.output().expect("a process");
        assert!(output.status.success(), "{lacks}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The other test's child.
#[test]
fn odd_products() {
    if std::env::var_os("ODD_PRODUCTS").is_none() {
        return;
    }
    let number = |i: usize| ((i * 37 + 11) % 29) as f32 / 16.0 - 0.75;
    for (dtype, shift) in [(Dtype::Bf16, 0), (Dtype::Bf16, 1), (Dtype::F16, 0), (Dtype::F32, 1)] {
        for [m, n, k] in [[3, 5, 7], [8, 16, 24], [2, 8, 3]] {
            let put = |len: usize, from: usize| {
                let values: Vec<f32> = (0..len).map(|i| number(i + from)).collect();
                let (wide, mut buf) =
                    (cuda().copied((&values[..]).into()), cuda().zeroed(dtype, len + shift));
                cuda().cast(buf.view_mut().slice(shift..len + shift), wide.view());
                (values, buf)
            };
            let ((x, x_there), (w, w_there), (bias, bias_there)) = (put(m * k, 0), put(n * k, 5), put(n, 9));
            let mut y = cuda().zeroed(dtype, m * n);
            let [x_view, w_view, bias_view] = [&x_there, &w_there, &bias_there].map(|buf| {
                let all = buf.view();
                all.slice(shift..all.len())
            });
            cuda().matmul_bias_forward(y.view_mut(), x_view, w_view, Some(bias_view), m, n, k);
            cuda().matmul_forward(y.view_mut(), x_view, w_view, m, n, k, Write::Add);
            for (i, got) in to_host(y.view()).into_iter().enumerate() {
                let sum: f32 = (0..k).map(|j| x[i / n * k + j] * w[i % n * k + j]).sum();
                let want = 2.0 * sum + bias[i % n];
                assert!(
                    (got - want).abs() < 0.02 * (1.0 + want.abs()),
                    "{dtype:?} {m} {n} {k}: {got}, {want}"
                );
            }
        }
    }
}

/// A home that can't be written is no reason not to train.
#[test]
fn kernels_that_cant_be_kept_are_used() {
    let cache = tempfile::tempdir().expect("a folder");
    let file = cache.path().join("kernels");
    std::fs::write(&file, "no folder").expect("written");
    let cuda = Cuda::open(&places(), 0, Some(file.clone())).expect("opened");
    cuda.warm_up().expect("compiled");
    assert!(
        cuda.unkept_kernels().is_some_and(|why| why.contains("kernels/flat-sm_90")),
        "{:?}",
        cuda.unkept_kernels()
    );
    assert_eq!(std::fs::read(&file).expect("untouched"), b"no folder");
}

#[test]
fn memory_of_the_one_is_never_used_as_the_others() {
    let (here, there) = (Buf::zeroed(4), cuda().zeroed(Dtype::F32, 4));
    let refused = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    assert!(refused(&|| assert_eq!(there.view().host(), [0.0; 4])));
    assert!(refused(&|| cuda().scale(Buf::zeroed(4).view_mut(), 1.0)));
    assert!(!refused(&|| assert_eq!(here.view().host(), [0.0; 4])));
}

/// Kernels of an image (ELF) and the bytes of shared memory that each has whatever its launch says. Since sm_90 the first 1024 are the
/// system's, which the card's maximum doesn't count.
fn static_shared(image: &[u8]) -> Vec<(String, u64)> {
    let number = |at: u64, bytes: usize| {
        let at = at as usize;
        image[at..at + bytes].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))
    };
    let (sections, size, count, names) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2), number(0x3e, 2));
    let section = |i: u64| sections + i * size;
    let texts = number(section(names) + 0x18, 8);
    let name = |i: u64| {
        let from = (texts + number(section(i), 4)) as usize;
        String::from_utf8_lossy(image[from..].split(|byte| *byte == 0).next().unwrap_or(&[])).into_owned()
    };
    let kernel = |i: u64| {
        let kernel = name(i).strip_prefix(".nv.shared.")?.to_owned();
        Some((kernel, number(section(i) + 0x20, 8)))
    };
    (0..count).filter_map(kernel).collect()
}

/// The real compiler, for each kind of card: no GPU is needed for that.
#[test]
fn kernels_compile_for_each_kind_of_card() {
    let Some(folder) = card::nvrtc() else { return };
    let places = Places { job: vec![folder], ..Places::default() };
    for arch in ["sm_80", "sm_90", "sm_100"] {
        let images = cuda::compile_all(&places, arch).expect("compiles");
        assert_eq!(images.len(), 8);
        assert!(images.iter().all(|(_, image)| image.starts_with(b"\x7fELF")), "{arch}");
        let reserved = if arch == "sm_80" { 0 } else { 1024 };
        for (file, image) in &images {
            let arrays = static_shared(image).into_iter().filter(|(_, bytes)| *bytes > reserved);
            // A launch with dynamic shared memory asks for all that a block may have: none is left for static arrays.
            let is_dynamic = ["flash.cu", "attention.cu"].contains(file);
            assert!(
                !is_dynamic || arrays.clone().count() == 0,
                "{file} for {arch}: {:?}",
                arrays.collect::<Vec<_>>()
            );
            assert!(*file != "norm.cu" || arrays.count() > 0, "sections of {file} for {arch} aren't found");
        }
    }
    let Err(e) = cuda::compile_all(&places, "sm_12") else { panic!("there is no such card") };
    assert!(e.to_string().contains("gpu-architecture"), "{e}");
}
