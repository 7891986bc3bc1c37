//! Writes files in the format of `torch.save`, for tests.

/// A value that [`encode_torch_file`] can encode.
pub(crate) enum TestValue {
    Str(String),
    Int(i64),
    Dict(Vec<(TestValue, TestValue)>),
    List(Vec<TestValue>),
    /// A `torch.Size`.
    Size(Vec<u64>),
    /// An F32 tensor: its shape and its elements.
    Tensor(Vec<u64>, Vec<f32>),
    /// A Python class or another global object: its module and its name.
    Global(&'static str, &'static str),
    /// An object: the module and the name of its class, and its attributes.
    Object(&'static str, &'static str, Vec<(&'static str, TestValue)>),
}

/// Makes a Python dict with text keys from pairs of key and value.
pub(crate) fn make_dict(pairs: Vec<(&str, TestValue)>) -> TestValue {
    TestValue::Dict(pairs.into_iter().map(|(k, v)| (TestValue::Str(k.into()), v)).collect())
}

/// Encodes a torch file in the zip format that contains `value`. Returns the bytes of the file.
pub(crate) fn encode_torch_file(value: &TestValue) -> Vec<u8> {
    let (mut input, mut storages) = (b"\x80\x02".to_vec(), Vec::new());
    write_value(value, &mut input, &mut storages);
    input.push(b'.');
    let keys: Vec<String> = (0..storages.len()).map(|i| format!("archive/data/{i}")).collect();
    let mut members: Vec<(&str, &[u8])> = vec![("archive/data.pkl", &input), ("archive/version", b"3\n")];
    members.extend(keys.iter().zip(&storages).map(|(k, s): (&String, &Vec<u8>)| (k.as_str(), s.as_slice())));
    crate::tests::pack_zip(&members)
}

/// Encodes `value`, which has no tensors, as a pickle. Returns the bytes of the pickle.
pub(crate) fn encode_pickle(value: &TestValue) -> Vec<u8> {
    let (mut out, mut storages) = (b"\x80\x02".to_vec(), Vec::new());
    write_value(value, &mut out, &mut storages);
    assert!(storages.is_empty(), "a pickle contains no tensor data");
    out.push(b'.');
    out
}

fn write_text(s: &str, out: &mut Vec<u8>) {
    out.push(b'X');
    out.extend((s.len() as u32).to_le_bytes());
    out.extend(s.as_bytes());
}

fn write_int(n: i64, out: &mut Vec<u8>) {
    out.extend([0x8a, 8]);
    out.extend(n.to_le_bytes());
}

fn write_int_tuple(values: &[u64], out: &mut Vec<u8>) {
    out.push(b'(');
    values.iter().for_each(|&n| write_int(n as i64, out));
    out.push(b't');
}

fn write_value(value: &TestValue, out: &mut Vec<u8>, storages: &mut Vec<Vec<u8>>) {
    match value {
        TestValue::Str(s) => write_text(s, out),
        TestValue::Int(n) => write_int(*n, out),
        TestValue::Dict(pairs) => {
            out.extend(b"}(");
            for (key, value) in pairs {
                write_value(key, out, storages);
                write_value(value, out, storages);
            }
            out.push(b'u');
        }
        TestValue::List(items) => {
            out.extend(b"](");
            items.iter().for_each(|v| write_value(v, out, storages));
            out.push(b'e');
        }
        TestValue::Size(sizes) => {
            out.extend(b"ctorch\nSize\n");
            write_int_tuple(sizes, out);
            out.extend(b"\x85R");
        }
        TestValue::Global(module, name) => out.extend(format!("c{module}\n{name}\n").bytes()),
        TestValue::Object(module, name, attributes) => {
            out.extend(format!("c{module}\n{name}\n").bytes());
            // an empty tuple of arguments, NEWOBJ, the dict of attributes, and BUILD
            out.extend(b")\x81}(");
            for (key, value) in attributes {
                write_text(key, out);
                write_value(value, out, storages);
            }
            out.extend(b"ub");
        }
        TestValue::Tensor(shape, values) => {
            out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            write_text("storage", out);
            out.extend(b"ctorch\nFloatStorage\n");
            write_text(&storages.len().to_string(), out);
            write_text("cpu", out);
            write_int(values.len() as i64, out);
            out.extend(b"tQ");
            write_int(0, out);
            write_int_tuple(shape, out);
            let strides: Vec<u64> = (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
            write_int_tuple(&strides, out);
            out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
            storages.push(values.iter().flat_map(|v| v.to_le_bytes()).collect());
        }
    }
}
