//! Encodes a file with the random generator states (RNG) of one rank, with the same bytes as
//! `torch.save`.
use super::streams::{NumpyModule, NumpyRngState, PythonRngState, RankRngStates, RngFormat, TorchCudaStates};
use crate::codec::torch_writer::encode_end_records;

/// Alignment in bytes of the data of tensors in an encoded torch file.
const TENSOR_DATA_ALIGNMENT: usize = 64;

/// Returns the bytes of the file with the random generator states of one rank, in the format of the
/// program `writer`. `stem` is the file name without its extension, which torch uses as the name of
/// the directory inside of the zip.
pub(super) fn encode_rank_rng_file(writer: RngFormat, stem: &str, states: &RankRngStates) -> Vec<u8> {
    let mut pickle = PickleWriter { out: vec![0x80, 2, b'}', b'('], storages: Vec::new() };
    let [python, numpy, cpu, cuda] = match writer {
        RngFormat::Trainer => ["python", "numpy", "cpu", "cuda"],
        RngFormat::Accelerate => {
            ["random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed"]
        }
    };
    if let Some(step) = states.step.filter(|_| writer == RngFormat::Accelerate) {
        pickle.write_text("step");
        pickle.write_int(step);
    }
    pickle.write_text(python);
    pickle.write_python_state(&states.python);
    pickle.write_text(numpy);
    pickle.write_numpy_state(&states.numpy, states.numpy_module);
    pickle.write_text(cpu);
    pickle.write_tensor(states.cpu.0.as_slice());
    match &states.cuda {
        None => {}
        Some(TorchCudaStates::SingleDevice(device)) => {
            pickle.write_text(cuda);
            pickle.write_tensor(&device.0);
        }
        Some(TorchCudaStates::PerDevice(devices)) => {
            pickle.write_text(cuda);
            pickle.out.extend(b"](");
            devices.iter().for_each(|d| pickle.write_tensor(&d.0));
            pickle.out.push(b'e');
        }
    }
    pickle.out.extend(b"u.");
    let mut zip = ZipWriter::new(stem);
    zip.add_member("data.pkl", &pickle.out, false);
    zip.finish(&pickle.storages)
}

/// Encodes a pickle of protocol 2, value by value.
pub(super) struct PickleWriter {
    /// The opcodes written so far.
    pub(super) out: Vec<u8>,
    /// The bytes of each tensor written so far. The index is the key of the tensor's storage.
    pub(super) storages: Vec<Vec<u8>>,
}

impl PickleWriter {
    /// Writes a string to the pickle: its length as a u32 and its UTF-8 bytes.
    pub(super) fn write_text(&mut self, text: &str) {
        self.out.push(b'X');
        self.out.extend((text.len() as u32).to_le_bytes());
        self.out.extend(text.as_bytes());
    }

    /// Writes an integer to the pickle with the opcode that Python's pickler uses for it.
    pub(super) fn write_int(&mut self, n: i64) {
        match (u8::try_from(n), i32::try_from(n)) {
            (Ok(n), _) => self.out.extend([b'K', n]),
            (_, Ok(n)) => {
                self.out.push(b'J');
                self.out.extend(n.to_le_bytes());
            }
            _ => {
                self.out.extend([0x8a, 8]);
                self.out.extend(n.to_le_bytes());
            }
        }
    }

    /// Writes a float to the pickle with its opcode and its big-endian bytes.
    pub(super) fn write_float(&mut self, x: f64) {
        self.out.push(b'G');
        self.out.extend(x.to_be_bytes());
    }

    /// Writes a reference to the Python class or function `module.name` to the pickle.
    fn write_global(&mut self, module: &str, name: &str) {
        self.out.extend(format!("c{module}\n{name}\n").as_bytes());
    }

    /// Writes the state of Python's random generator to the pickle, in the form of
    /// `random.getstate()`.
    fn write_python_state(&mut self, state: &PythonRngState) {
        self.write_int(3);
        self.out.push(b'(');
        state.twister.words.iter().for_each(|w| self.write_int(i64::from(*w)));
        self.write_int(i64::from(state.twister.position));
        self.out.push(b't');
        match state.gauss_next {
            Some(g) => self.write_float(g),
            None => self.out.push(b'N'),
        }
        self.out.push(0x87);
    }

    /// Writes the state of NumPy's random generator to the pickle, in the form of
    /// `numpy.random.get_state()`. The pickled array names the NumPy module `names`.
    fn write_numpy_state(&mut self, state: &NumpyRngState, names: NumpyModule) {
        self.out.push(b'(');
        self.write_text("MT19937");
        self.write_global(names.module_name(), "_reconstruct");
        self.write_global("numpy", "ndarray");
        self.out.extend(b"K\0\x85");
        self.write_latin1_bytes(b"b");
        self.out.extend(b"\x87R(K\x01M\x70\x02\x85");
        self.write_global("numpy", "dtype");
        self.write_text("u4");
        self.out.extend(b"\x89\x88\x87R(K\x03");
        self.write_text("<");
        self.out.extend(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89");
        let bytes: Vec<u8> = state.twister.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.write_latin1_bytes(&bytes);
        self.out.extend(b"tb");
        self.write_int(i64::from(state.twister.position));
        self.write_int(i64::from(state.has_gauss));
        self.write_float(state.cached_gaussian);
        self.out.push(b't');
    }

    /// Writes a byte string to the pickle in the form of protocol 2, as a call that encodes Latin-1
    /// text.
    fn write_latin1_bytes(&mut self, bytes: &[u8]) {
        self.write_global("_codecs", "encode");
        let text: String = bytes.iter().map(|&b| char::from(b)).collect();
        self.write_text(&text);
        self.write_text("latin1");
        self.out.extend(b"\x86R");
    }

    /// Writes a U8 tensor with the elements `bytes` to the pickle, as a reference to a tensor
    /// storage that becomes a separate member of the torch file.
    fn write_tensor(&mut self, bytes: &[u8]) {
        let (key, len) = (self.storages.len().to_string(), bytes.len() as i64);
        self.storages.push(bytes.to_vec());
        self.write_global("torch._utils", "_rebuild_tensor_v2");
        self.out.extend(b"((");
        self.write_text("storage");
        self.write_global("torch", "ByteStorage");
        self.write_text(&key);
        self.write_text("cpu");
        self.write_int(len);
        self.out.extend(b"tQK\0");
        self.write_int(len);
        self.out.extend(b"\x85K\x01\x85\x89");
        self.write_global("collections", "OrderedDict");
        self.out.extend(b")RtR");
    }
}

/// Encodes a zip file with stored (uncompressed) members in the layout of torch.
pub(super) struct ZipWriter {
    /// The directory inside of the zip that contains every member.
    root: String,
    /// The bytes of the members added so far.
    file: Vec<u8>,
    /// The entries of the central directory for the members added so far.
    directory: Vec<u8>,
    /// Number of members added so far.
    count: u16,
}

impl ZipWriter {
    /// Begins an empty zip, whose members will be in the directory `root` inside of the zip.
    pub(super) fn new(root: &str) -> ZipWriter {
        ZipWriter { root: root.to_owned(), file: Vec::new(), directory: Vec::new(), count: 0 }
    }

    /// Adds the member `name` with the content `data` to the zip. With `aligned`, the content
    /// begins at a multiple of [`TENSOR_DATA_ALIGNMENT`] in the file.
    pub(super) fn add_member(&mut self, name: &str, data: &[u8], aligned: bool) {
        let name = format!("{}/{name}", self.root);
        let at = self.file.len() as u32;
        let (len, crc) = (data.len() as u32, crc32fast::hash(data));
        // version 0, UTF-8 names, method "stored", no time
        let mut fields = vec![0, 0, 0, 8, 0, 0, 0, 0, 0, 0];
        fields.extend([crc, len, len].iter().flat_map(|n| n.to_le_bytes()));
        fields.extend((name.len() as u16).to_le_bytes());
        // an extra field `FB` of padding puts the data at a multiple of the alignment
        let start = self.file.len() + 30 + name.len() + 4;
        let padding = if aligned { start.next_multiple_of(TENSOR_DATA_ALIGNMENT) - start } else { 0 };
        let extra = if aligned { padding as u16 + 4 } else { 0 };
        self.file.extend(b"PK\x03\x04");
        self.file.extend(&fields);
        self.file.extend(extra.to_le_bytes());
        self.file.extend(name.as_bytes());
        if aligned {
            self.file.extend(b"FB");
            self.file.extend((padding as u16).to_le_bytes());
            self.file.extend(std::iter::repeat_n(b'Z', padding));
        }
        self.file.extend(data);
        self.directory.extend(b"PK\x01\x02\0\0");
        self.directory.extend(&fields);
        // no extra field, comment, disk or attributes
        self.directory.extend([0u8; 12]);
        self.directory.extend(at.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.count += 1;
    }

    /// Completes the zip file: adds the tensor data `storages`, the other members that torch
    /// expects, and the central directory. Returns the bytes of the file.
    pub(super) fn finish(mut self, storages: &[Vec<u8>]) -> Vec<u8> {
        self.add_member(".format_version", b"1", false);
        self.add_member(".storage_alignment", TENSOR_DATA_ALIGNMENT.to_string().as_bytes(), false);
        self.add_member("byteorder", b"little", false);
        for (key, data) in storages.iter().enumerate() {
            self.add_member(&format!("data/{key}"), data, true);
        }
        self.add_member("version", b"3\n", false);
        let ZipWriter { mut file, directory, count, .. } = self;
        let at = file.len() as u64;
        file.extend(&directory);
        file.extend(encode_end_records(at, directory.len() as u64, u64::from(count)));
        file
    }
}
