"""A file that is not UTF-8 is read rightly, or refused with a remedy that reads it."""

import re

import pytest
from test_pairs import pairs_of

from st_magnitude.data.beir import DataError
from st_magnitude.workbench.files.pairs import load_splits

WESTERN = {
    "German": ("Wie bekomme ich „mein“ Geld zurück?", "Für Flüge – spätestens nach zehn Tagen."),
    "French": ("Où demander un remboursement ?", "Déposez la réclamation à l’agence, ça dépend."),
    "Spanish": ("¿Cómo me devuelven el dinero?", "El reembolso llega mañana, según la petición."),
    "Portuguese": ("Como recebo o dinheiro até amanhã?", "Após o pedido, não há mais informações."),
    "Swedish": ("Hur får jag tillbaka pengarna?", "Här är en större båt på ön, säger de."),
    "Finnish": ("Miten saan rahat takaisin päivässä?", "Hyvää yötä, tämä on yhtiön tehtävä."),
    "Italian": (
        "Il volo è cancellato, perché?",
        "Il rimborso è già partito, così arriverà.",
    ),
}
# each language in its usual encodings
OTHERS = {
    "Russian": (
        ("Как вернуть деньги за билет?", "Деньги возвращаются на карту в течение десяти дней."),
        ("cp1251", "koi8_r", "cp866", "mac_cyrillic", "utf-16"),
    ),
    "Japanese": (
        ("払い戻しはどうすればいいですか", "十日以内にカードへ返金されます。設定から申請して。"),
        ("shift_jis", "euc_jp"),
    ),
    "Chinese": (
        ("如何退票并取回我的钱？", "申请之后十天之内钱会退回到您的卡上。请在设置中申请。"),
        ("gb18030", "utf-32"),
    ),
    "Korean": (
        ("어떻게 환불을 받나요?", "환불은 신청 후 열흘 안에 카드로 입금됩니다."),
        ("euc_kr",),
    ),
    "Greek": (("Πώς παίρνω πίσω τα χρήματα;", "Επιστρέφουν μέσα σε δέκα ημέρες."), ("cp1253",)),
    "Hebrew": (("איך מקבלים החזר?", "הכסף חוזר לכרטיס תוך עשרה ימים."), ("cp1255",)),
    "Arabic": (("كيف أسترد أموالي؟", "يعود المال إلى البطاقة خلال عشرة أيام."), ("cp1256",)),
    "Polish": (
        ("Jak zwrócić pieniądze, jeśli źle?", "Pieniądze wracają w ciągu dziesięciu dni, żółć."),
        ("cp1250", "cp852"),
    ),
    "Czech": (("Jak vrátit peníze, když ne?", "Příště, po podání řádné žádosti."), ("cp1250",)),
    "French": (WESTERN["French"], ("mac_roman",)),
    "Portuguese": (WESTERN["Portuguese"], ("mac_roman", "cp850")),
    "Hungarian": (("Hogyan jön vissza a pénz?", "Őrült fűtőgép, húsz nap múlva."), ("cp1250",)),
    "Croatian": (("Kako ću dobiti novac?", "Čovjek, đak, šuma i žaba čekaju."), ("cp1250",)),
    "Turkish": (("Paramı nasıl geri alırım?", "On gün içinde karta döner, şişe."), ("cp1254",)),
}
CASES = [(pair, code) for pair in WESTERN.values() for code in ("cp1252", "utf-8")]
CASES += [(pair, code) for pair, codes in OTHERS.values() for code in codes]


SIGNS = " 25 m², 90 °C, § 5, 1½, ± 2, 2 × 3, nº 1, Foo®, © 2020, 5 µm"


@pytest.mark.parametrize(("pair", "code"), CASES)
@pytest.mark.parametrize(("number", "signs"), [(2, ""), (40, ""), (3, SIGNS)])
def test_no_text_is_misread(tmp_path, pair, code, number, signs):
    """All that is Unicode is read. Others are refused: with one of the encodings that the message
    names, the file has the texts that were written."""
    signs = signs.encode(code, "ignore").decode(code)
    pairs = {(f"{pair[0]} {i}", f"{pair[1]} {i}{signs}") for i in range(number)}
    text = "query\tdocument\n" + "".join(f"{q}\t{d}\n" for q, d in sorted(pairs))
    file = tmp_path / "my a.csv"
    file.write_bytes(text.encode(code))
    if code.startswith("utf"):
        assert pairs_of(load_splits(file)) == pairs
        return
    read = refused_as(file)
    assert len({*read.values()}) >= len(read) - 1
    assert pairs in [pairs_of(load_splits(file, encoding=name)) for name in read]


def refused_as(file):
    """The samples in the message on a file that is not UTF-8, by encoding."""
    with pytest.raises(DataError, match=r"is not UTF-8\. It reads as ") as refused:
        load_splits(file)
    return dict(re.findall(r""" as (\w+) ('[^']+'|"[^"]+")""", str(refused.value)))


@pytest.mark.parametrize("text", ["naïve café", "Как вернуть"])
def test_a_single_wrong_byte_takes_no_other_letter_with_it(tmp_path, text):
    file = tmp_path / "a.csv"
    file.write_bytes(f"query,document\n{text},a\nc@,b\n".encode().replace(b"@", b"\xe9"))
    splits = load_splits(file)
    assert {query for query, _ in pairs_of(splits)} == {text, "c\ufffd"}
    assert "line 3: is not UTF-8; the file was read with 1 wrong byte" in splits.notes[0]


def test_an_encoding_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"query,document\n\x81,b\n")
    for name in ("cp1252", "cp12"):
        with pytest.raises(DataError, match=f"not read with --encoding {name}"):
            load_splits(tmp_path / "a.csv", encoding=name)
    with pytest.raises(DataError, match=r"--encoding \w"):
        load_splits(tmp_path / "a.csv")
