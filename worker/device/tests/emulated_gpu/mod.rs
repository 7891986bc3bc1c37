//! Builds the emulated GPU, which consists of shared libraries in place of the CUDA driver, the
//! compiler, cuBLASLt and cuDNN that run kernels on the CPU. They are built from the sources in
//! this directory and from the kernels' own sources, and opened in place of NVIDIA's.
use std::{
    fmt::Write as _,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// File name and source files of each emulated library.
const LIBRARIES: [(&str, &[&str]); 4] = [
    ("libcuda.so.1", &["libcuda.cpp", "interpreter.cpp"]),
    ("libnvrtc.so.13", &["libnvrtc.cpp"]),
    ("libcublasLt.so.13", &["libcublaslt.cpp"]),
    (CUDNN, &["libcudnn.cpp"]),
];
/// File name of the emulated cuDNN. cuDNN is optional, so it is in a separate directory, `cudnn`,
/// below the directory of the other libraries.
const CUDNN: &str = "libcudnn.so.9";
/// Names of the kernel sources, without `.cu`.
const KERNEL_SOURCES: [&str; 11] = [
    "elementwise",
    "norm",
    "activation",
    "expert_rows",
    "classifier",
    "attention",
    "flash",
    "flash_f16",
    "flash_256",
    "flash_256_f16",
    "fp8",
];

/// Returns the directory of the emulated libraries, and builds them first if needed. With
/// `LAUNCH_TEST_EMULATED_GPU=ptx`, returns [`ptx_library_directory`].
#[allow(dead_code, reason = "some test files only build the libraries")]
pub(crate) fn library_directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| match std::env::var("LAUNCH_TEST_EMULATED_GPU").as_deref() {
        Ok("ptx") => ptx_library_directory().expect("LAUNCH_TEST_EMULATED_GPU=ptx needs NVRTC"),
        _ => cpp_library_directory().to_owned(),
    })
}

/// Returns the directory of the emulated libraries that run the kernels as compiled C++. Builds
/// them first if needed.
#[allow(dead_code, reason = "some test files do not use it")]
fn cpp_library_directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let [sources, kernels] =
            ["tests/emulated_gpu", "src/cuda/kernels"].map(|path| find_device_crate().join(path));
        let compiler = Command::new("c++").arg("--version").output();
        let compiler = compiler.expect("a C++ compiler (scripts/setup-tests installs one)").stdout;
        let options = compiler_options().concat();
        let inputs = hash_inputs(&[&sources, &kernels], &[&compiler, options.as_bytes()]);
        find_or_create("emulated-gpu", inputs, |new| build_libraries(&sources, &kernels, new))
    })
}

/// Returns a hash of the files in `directories` and of `other` inputs of a compiler.
pub(crate) fn hash_inputs(directories: &[&Path], other: &[&[u8]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for directory in directories {
        let mut files: Vec<_> =
            fs::read_dir(directory).expect("sources").map(|e| e.expect("entry").path()).collect();
        files.sort();
        files.iter().for_each(|file| fs::read(file).expect("a source").hash(&mut hasher));
    }
    other.hash(&mut hasher);
    hasher.finish()
}

/// Returns the directory `NAME-HASH` in the cache of the tests, whose files depend only on the
/// hashed `inputs`. Calls `create` with a new directory if it does not exist. That takes up to a
/// minute of CPU time, so that concurrent tests wait for it.
pub(crate) fn find_or_create(name: &str, inputs: u64, create: impl FnOnce(&Path)) -> PathBuf {
    let cache = find_cache().unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    fs::create_dir_all(&cache).expect("a directory");
    let directory = cache.join(format!("{name}-{inputs:016x}"));
    if !directory.exists() {
        let lock = fs::File::create(directory.with_extension("lock")).expect("a lock file");
        lock.lock().expect("locked");
        if !directory.exists() {
            let new = directory.with_extension("new");
            // An interrupted test may have left an incomplete directory.
            _ = fs::remove_dir_all(&new);
            fs::create_dir(&new).expect("a directory");
            create(&new);
            fs::rename(&new, &directory).expect("renamed");
        }
    }
    directory
}

/// Returns the architecture of the emulated GPU: Ada, or Hopper if the kernels run as PTX.
#[allow(dead_code, reason = "some test files do not use it")]
pub(crate) fn architecture() -> &'static str {
    match std::env::var("LAUNCH_TEST_EMULATED_GPU").as_deref() {
        Ok("ptx") => "sm_90",
        _ => "sm_89",
    }
}

/// Returns the directory of the emulated libraries that run the kernels as PTX, compiled by
/// NVIDIA's own NVRTC. Their driver interprets the PTX that NVRTC generates for the kernels.
/// Returns `None` if NVRTC is not installed (`scripts/setup-tests` installs it). Panics in that
/// case if `LAUNCH_TEST_REQUIRE=all`.
#[allow(dead_code, reason = "some test files do not use it")]
pub(crate) fn ptx_library_directory() -> Option<PathBuf> {
    let nvrtc = nvrtc_directory()?;
    let cpp = cpp_library_directory();
    let inputs =
        hash_inputs(&[], &[cpp.as_os_str().as_encoded_bytes(), nvrtc.as_os_str().as_encoded_bytes()]);
    Some(find_or_create("emulated-gpu-ptx", inputs, |new| {
        for (library, _) in LIBRARIES.into_iter().filter(|(library, _)| *library != CUDNN) {
            fs::copy(cpp.join(library), new.join(library)).expect("copied");
        }
        for (name, target) in [("nvrtc", nvrtc), ("cudnn", cpp.join("cudnn"))] {
            std::os::unix::fs::symlink(target, new.join(name)).expect("a link");
        }
    }))
}

/// Returns the directory of NVIDIA's NVRTC, or `None` if it is not installed. Panics in that case
/// if `LAUNCH_TEST_REQUIRE=all`.
#[allow(dead_code, reason = "some test files do not use it")]
pub(crate) fn nvrtc_directory() -> Option<PathBuf> {
    let directory = find_cache().expect("a home directory").join("nvrtc/nvidia/cu13/lib");
    if directory.exists() {
        return Some(directory);
    }
    let reason = "skipped: NVRTC is not installed (scripts/setup-tests installs it)";
    assert!(std::env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{reason}");
    eprintln!("{reason}");
    None
}

/// Returns the directory in which `scripts/setup-tests` stores what it installs, or `None` without
/// a home directory.
fn find_cache() -> Option<PathBuf> {
    let cache = std::env::var_os("LAUNCH_TEST_CACHE").map(PathBuf::from);
    cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/launch-tests")))
}

/// Returns the directory of the crate `device`. The tests of `device`, of `worker` and of the
/// executable include this module, each from another directory.
pub(crate) fn find_device_crate() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let candidates = [manifest.join("../device"), manifest.join("device"), manifest.join("worker/device")];
    candidates.into_iter().find(|path| path.join("tests/emulated_gpu").exists()).expect("the crate `device`")
}

/// Returns the options with which the emulated libraries are compiled. The libraries use the fused
/// multiply-add of this CPU if it has one. Otherwise, each operation is a call of the C library.
fn compiler_options() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let has_fma = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let has_fma = false;
    let cpu: &[&str] = if has_fma { &["-mavx2", "-mfma"] } else { &[] };
    let language = ["-std=c++17", "-ffp-contract=off", "-U_FORTIFY_SOURCE"];
    let library = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden"];
    [&language[..], &library, cpu].concat()
}

/// Builds the emulated libraries in the directory `new`.
fn build_libraries(sources: &Path, kernels: &Path, new: &Path) {
    fs::create_dir_all(new.join("cudnn")).expect("a directory");
    fs::write(new.join("kernels.inc"), generate_kernel_include(kernels)).expect("written");
    for (library, files) in LIBRARIES {
        let output = Command::new("c++")
            .args(compiler_options())
            .args(["-Wall", "-Wno-unknown-pragmas", "-Werror", "-I"])
            .arg(kernels)
            .arg("-I")
            .arg(new)
            .arg("-I")
            .arg(sources)
            .arg(format!("-Wl,-soname,emulated-{library}"))
            .arg("-o")
            .arg(new.join(if library == CUDNN { "cudnn" } else { "" }).join(library))
            .args(files.iter().map(|file| sources.join(file)))
            .output()
            .expect("a C++ compiler (scripts/setup-tests installs one)");
        assert!(output.status.success(), "{files:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Generates the source that includes every kernel source and lists the kernels for the emulated
/// driver. Each source is in a separate namespace, because each is a separate module on a GPU.
fn generate_kernel_include(kernels: &Path) -> String {
    let mut text = String::from(
        "#undef KERNEL\n#undef WIDE_KERNEL\n#define KERNEL static void\n#define WIDE_KERNEL static void\n",
    );
    let mut list = String::new();
    for file in KERNEL_SOURCES {
        writeln!(text, "namespace {file} {{\n#include \"{file}.cu\"\n}}").expect("a string");
        let source = fs::read_to_string(kernels.join(format!("{file}.cu"))).expect("a source");
        for line in source.lines() {
            let Some(line) = line.strip_prefix("WIDE_").unwrap_or(line).strip_prefix("KERNEL ") else {
                continue;
            };
            let name = line.split('(').next().expect("a name");
            write!(list, " X({file}, {name})").expect("a string");
        }
    }
    text + "#define KERNELS(X)" + &list + "\n"
}
