//! Optimizer states that lie elsewhere than ops compute come to rooms there for their update, one unit after the other: while one
//! is updated, the next one comes and the last one goes back.
use super::UnitStates;
use device::{Buf, Dtype, Ops, ViewMut, storage::Event};

/// Two rooms.
#[derive(Default)]
pub(super) struct Rooms([Room; 2]);

/// For the states of a unit.
#[derive(Default)]
struct Room {
    vectors: [Buf; 2],
    /// Whose states are in it, or come.
    unit: Option<usize>,
    /// The end of the copies to or from it.
    copied: Event,
}

impl Rooms {
    /// Rooms for the largest of these units; none where all states lie where ops compute.
    pub(super) fn of(ops: &dyn Ops, units: &[UnitStates]) -> Self {
        let away = units.iter().filter(|st| st.first.is_away(ops) || st.second.is_away(ops));
        let lens = away.fold([0, 0], |most, st| [most[0].max(st.first.len()), most[1].max(st.second.len())]);
        let room = || Room { vectors: lens.map(|len| ops.zeroed(Dtype::F32, len)), ..Room::default() };
        Rooms([room(), room()])
    }

    /// The states of unit `u` begin to come, unless they do already or needn't.
    pub(super) fn bring(&mut self, ops: &dyn Ops, u: usize, st: &mut UnitStates) {
        let away = st.first.is_away(ops) || st.second.is_away(ops);
        if !away || self.0.iter().any(|room| room.unit == Some(u)) {
            return;
        }
        let room = self.0.iter_mut().find(|room| room.unit.is_none()).expect("one unit is updated at a time");
        let free = std::mem::take(&mut room.copied);
        for (states, there) in [&mut st.first, &mut st.second].into_iter().zip(&mut room.vectors) {
            if !states.is_empty() {
                room.copied = states.bring(ops, there.view_mut().slice(0..states.len()), &free);
            }
        }
        room.unit = Some(u);
    }

    /// The states of unit `u` where ops compute.
    pub(super) fn at_hand<'a>(
        &'a mut self,
        ops: &dyn Ops,
        u: usize,
        st: &'a mut UnitStates,
    ) -> [ViewMut<'a>; 2] {
        self.bring(ops, u, st);
        let lens = [st.first.len(), st.second.len()];
        match self.0.iter_mut().find(|room| room.unit == Some(u)) {
            None => [st.first.view_mut(), st.second.view_mut()],
            Some(room) => {
                room.copied.follow();
                let [first, second] = &mut room.vectors;
                [first.view_mut().slice(0..lens[0]), second.view_mut().slice(0..lens[1])]
            }
        }
    }

    /// The updated states of unit `u` begin to go back.
    pub(super) fn take_back(&mut self, ops: &dyn Ops, u: usize, st: &mut UnitStates) {
        let Some(room) = self.0.iter_mut().find(|room| room.unit == Some(u)) else { return };
        for (states, there) in [&mut st.first, &mut st.second].into_iter().zip(&room.vectors) {
            if !states.is_empty() {
                room.copied = states.take_back(ops, there.view().slice(0..states.len()));
            }
        }
        room.unit = None;
    }
}
