//! The emulated card: a driver, a compiler and matrix products as shared libraries, built from the files beside this one and
//! from the kernels' own sources. The product opens them as it opens NVIDIA's.
use std::{
    fmt::Write as _,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// Library, source.
const LIBRARIES: [(&str, &str); 4] = [
    ("libcuda.so.1", "libcuda.cpp"),
    ("libnvrtc.so.13", "libnvrtc.cpp"),
    ("libcublasLt.so.13", "libcublaslt.cpp"),
    (CUDNN, "libcudnn.cpp"),
];
/// In a folder of its own, `cudnn` of the others': attention goes without it.
const CUDNN: &str = "libcudnn.so.9";
const SOURCES: [&str; 8] = ["flat", "norm", "activation", "rows", "classifier", "attention", "flash", "fp8"];

/// Where the emulated libraries lie; built by the first test that asks. `LAUNCH_TEST_CARD=compiled`: with NVIDIA's compiler.
#[allow(dead_code, reason = "not every test file that has the card opens it")]
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| match std::env::var("LAUNCH_TEST_CARD").as_deref() {
        Ok("compiled") => compiled_folder().expect("LAUNCH_TEST_CARD=compiled needs NVRTC"),
        _ => source_folder().to_owned(),
    })
}

/// With kernels as C++.
#[allow(dead_code, reason = "as above")]
fn source_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let [sources, kernels] = ["tests/card", "src/cuda/kernels"].map(|folder| device().join(folder));
        let mut hasher = DefaultHasher::new();
        for folder in [&sources, &kernels] {
            let mut files: Vec<_> =
                fs::read_dir(folder).expect("sources").map(|e| e.expect("entry").path()).collect();
            files.sort();
            files.iter().for_each(|file| fs::read(file).expect("a source").hash(&mut hasher));
        }
        let made = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("card-{:016x}", hasher.finish()));
        if !made.exists() {
            build(&sources, &kernels, &made);
        }
        made
    })
}

/// With NVIDIA's compiler: kernels run as the PTX that it makes of them. None where it isn't installed
/// (`scripts/setup-tests` does), which is an error where everything is asked for.
#[allow(dead_code, reason = "not every test file that has the card needs it")]
pub(crate) fn compiled_folder() -> Option<PathBuf> {
    let nvrtc = nvrtc()?;
    let made = source_folder().with_extension("compiled");
    if !made.exists() {
        let new = made.with_extension(std::process::id().to_string());
        fs::create_dir_all(&new).expect("a folder");
        for (library, _) in LIBRARIES.into_iter().filter(|(library, _)| *library != CUDNN) {
            fs::copy(source_folder().join(library), new.join(library)).expect("copied");
        }
        for (name, of) in [("nvrtc", nvrtc), ("cudnn", source_folder().join("cudnn"))] {
            std::os::unix::fs::symlink(of, new.join(name)).expect("a link");
        }
        put(&new, &made);
    }
    Some(made)
}

/// Where NVIDIA's compiler lies.
#[allow(dead_code, reason = "as above")]
pub(crate) fn nvrtc() -> Option<PathBuf> {
    let cache = std::env::var_os("LAUNCH_TEST_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/launch-tests")));
    let folder = cache.expect("a home").join("nvrtc/nvidia/cu13/lib");
    if folder.exists() {
        return Some(folder);
    }
    let why = "skipped: no NVRTC (scripts/setup-tests installs it)";
    assert!(std::env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{why}");
    eprintln!("{why}");
    None
}

/// The crate `device`, seen from its own tests, from the worker's or from those of the executable.
fn device() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let places = [here.join("../device"), here.join("device"), here.join("worker/device")];
    places.into_iter().find(|place| place.join("tests/card").exists()).expect("the crate `device`")
}

/// In a folder of its own first: whoever else builds at the same time sees all of it or nothing.
fn build(sources: &Path, kernels: &Path, made: &Path) {
    let new = made.with_extension(std::process::id().to_string());
    fs::create_dir_all(new.join("cudnn")).expect("a folder");
    fs::write(new.join("kernels.inc"), list_of_kernels(kernels)).expect("written");
    for (library, source) in LIBRARIES {
        let output = Command::new("c++")
            .args([
                "-std=c++17",
                "-O2",
                "-fPIC",
                "-shared",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-U_FORTIFY_SOURCE",
            ])
            .args(["-Wall", "-Wno-unknown-pragmas", "-Werror", "-I"])
            .arg(kernels)
            .arg("-I")
            .arg(&new)
            .arg("-I")
            .arg(sources)
            .arg(format!("-Wl,-soname,emulated-{library}"))
            .arg("-o")
            .arg(new.join(if library == CUDNN { "cudnn" } else { "" }).join(library))
            .arg(sources.join(source))
            .output()
            .expect("a C++ compiler (scripts/setup-tests installs one)");
        assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    }
    put(&new, made);
}

fn put(new: &Path, made: &Path) {
    if fs::rename(new, made).is_err() {
        assert!(made.exists(), "{} can't be made", made.display());
        fs::remove_dir_all(new).expect("removed");
    }
}

/// Every kernel in the sources, each file in a namespace of its own as each is a module of its own.
fn list_of_kernels(kernels: &Path) -> String {
    let mut text = String::from(
        "#undef KERNEL\n#undef WIDE_KERNEL\n#define KERNEL static void\n#define WIDE_KERNEL static void\n",
    );
    let mut all = String::new();
    for file in SOURCES {
        writeln!(text, "namespace {file} {{\n#include \"{file}.cu\"\n}}").expect("a string");
        let source = fs::read_to_string(kernels.join(format!("{file}.cu"))).expect("a source");
        for line in source.lines() {
            let Some(line) = line.strip_prefix("WIDE_").unwrap_or(line).strip_prefix("KERNEL ") else {
                continue;
            };
            let name = line.split('(').next().expect("a name");
            write!(all, " X({file}, {name})").expect("a string");
        }
    }
    text + "#define KERNELS(X)" + &all + "\n"
}
