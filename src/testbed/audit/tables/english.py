"""Put German and Chinese words of a page into the English ones that headings and sentences are known by."""

from __future__ import annotations

import re

_SIGNS = str.maketrans({
    "\uff0c": ", ", "\u3002": ". ", "\uff1b": "; ", "\uff1a": ": ", "\uff08": " (", "\uff09": ") ", "\u3001": " and ",
    "\uff01": "! ", "\uff05": "%",
})  # fmt: skip
# in the order in which they are looked for
_CHINESE = {
    r"全局|总(?=批)": "global ", r"总": "total ", r"批(?:处理|次|量)?(?:大小|尺寸)|批[量次]": "batch size",
    r"微批": "micro batch ", r"每卡": "per gpu ", r"每个": "per ", r"(?:每步|单步|迭代)(?:时间|耗时)|步时": "step time",
    r"单步": "step ", r"每步": "per step ", r"(?:显卡|设备)数量?|卡数": "gpus", r"节点数": "nodes", r"节点": " nodes ",
    r"吞吐[率量]?": "throughput ", r"加速比?": "speedup ", r"扩展效率|并行效率|线性度": "scaling efficiency",
    r"效率": "efficiency", r"序列长度": "sequence length", r"上下文长度": "context length",
    r"训练(?:时间|时长|耗时)": "training time", r"时间|耗时": "time", r"验证集?": "val ", r"测试": "test ",
    r"训练损失": "train loss", r"损失": " loss ", r"困惑度": " perplexity ", r"[准正]确率": " accuracy ",
    r"数据类型": "data type", r"(?:数值|训练)?精度": " precision ", r"模型": " model ", r"方法|方案": " method",
    r"策略": " strategy", r"框架": " framework", r"配置": " configuration", r"实现": " implementation",
    r"版本": " version ", r"硬件": "hardware", r"显卡": " gpus ", r"设备": " device ", r"爆显存|显存不足": " OOM ",
    r"状态": "status", r"备注": "notes", r"来源": "source", r"基[线准]": " baseline ", r"参考|对照": " reference ",
    r"原[版始]": " original ", r"官方|上游": " upstream ", r"本(?:框架|文|项目|仓库)|我们的": " ours ",
    r"我们": " we ",
    r"前者": " the former ", r"后者": " the latter ", r"其余|其[他它]": " the others ", r"均|所有|全部|都": " all ",
    r"两者": " both ", r"而": ", while ", r"但": ", but ", r"第一行": " first row ", r"第二行": " second row ",
    r"最后一行": " last row ", r"(?:非|未|没有)(?:经)?实测": " not measured ", r"实测|实际测量|测量": " measured ",
    r"估算|预估|估计": " estimated ", r"预[计期]": " expected ", r"理论": " theoretical ", r"预测": " predicted ",
    r"推算|外推": " extrapolated ", r"模拟|仿真": " simulated ", r"[摘引取来]自": " taken from ",
    r"论文": " their paper ", r"发散": " diverged ", r"崩溃": " crashed ", r"失败": " failed ", r"中断": " aborted ",
    r"预热": " warm-up ", r"编译": " compilation ", r"不(?:包[括含]|含)": " excluding ",
    r"包[括含]|含": " including ", r"数据加载": " data loading ", r"端到端": " end-to-end ",
    r"仅前向": " forward only ", r"使用": " used ", r"条序列": " sequences ", r"[个张块台](?!/)|下|提升": " ",
    r"设?为": " is ", r"和|与": " and ", r"数据": " data ", r"样本": "samples", r"图[片像]|张(?=/)": "images",
    r"秒": "s",
    r"速度": " speed ", r"分支": " branch ", r"词元": "tokens", r"小时": " hours", r"分钟": " minutes",
    r"目标": " goal ", r"规划|计划": " planned ", r"未(?:在|(?=复现))": " not ", r"复现": " rerun ", r"的": " ",
    r"数量?": "",
}  # fmt: skip
_GERMAN = {
    r"(?:batch|stapel)-?größen?": "batch size", r"globale[rnms]?": "global",
    r"(?:sequenz|kontext)länge": "sequence length", r"anzahl(?: der)? gpus|gpu-?anzahl|(?:grafik)?karten?": "gpus",
    r"knoten": "nodes", r"(?:gesamt)?durchsatz": "throughput", r"beschleunigung(?:sfaktor)?": "speedup",
    r"(?:skalierungs)?effizienz": "efficiency", r"schrittzeit|zeit (?:pro|je) schritt": "step time",
    r"trainings(?:zeit|dauer)|laufzeit|dauer": "training time",
    r"validierungs-?(?:verlust(?:e|s)?|loss)": "val loss", r"trainings-?verlust(?:e|s)?": "train loss",
    r"verlust(?:e|s)?": "loss", r"perplexität": "perplexity", r"genauigkeit": "accuracy", r"datentyp": "data type",
    r"modelle?s?": "model", r"verfahren|methoden?|varianten?": "method", r"strategie": "strategy",
    r"konfiguration": "configuration", r"je|pro": "per",
    r"referenz(?:lauf)?|vergleichslauf|basis(?:linie)?|ausgangs\w+": "baseline", r"unsere?[rsmn]?": "our",
    r"ursprüngliche[rsmn]?": "original", r"während|wogegen": "while", r"gegen(?:über)?": "against",
    r"statt|anstelle von|anstatt": "instead of", r"beide[nr]?": "both", r"alle[nr]?": "all", r"und": "and",
    r"aber": "but", r"(?:die )?(?:übrigen|restlichen|anderen)(?: zeilen)?": "the others",
    r"ersten? zeile": "first row", r"zweiten? zeile": "second row", r"letzten? zeile": "last row",
    r"(?:nicht|keine) gemessen|keine messung(?:en)?|ungemessen": "not measured",
    r"geschätzt\w*|schätzung(?:en)?": "estimated", r"hochrechnung(?:en)?|hochgerechnet\w*": "extrapolated",
    r"erwartet\w*|erwartung(?:en)?|voraussichtlich\w*": "expected", r"prognosen?|prognostiziert\w*": "projected",
    r"simuliert\w*|simulation(?:en)?": "simulated", r"(?:be|er)rechnet\w*": "calculated",
    r"gemessen\w*|messung(?:en)?": "measured",
    r"übernommen aus|zitiert(?: aus| nach)?|entnommen(?: aus)?|stamm(?:t|en) aus": "taken from",
    r"abgebrochen|abgestürzt": "crashed", r"divergiert\w*": "diverged", r"aufwärm\w*": "warm-up",
    r"einschließlich|inklusive|inkl\.?": "including", r"ohne": "without", r"kompilier(?:en|ung)": "compilation",
    r"(?:nur|lediglich) vorwärts\w*": "forward only", r"sequenz(?=/)": "sequence", r"sequenzen": "sequences",
    r"(?:beispiele|proben)(?=/)|beispielen?": "samples", r"bilder(?=/)|bildern?": "images",
    r"eine[rmns]?": "one", r"zwei": "two", r"drei": "three", r"vier": "four", r"acht": "eight", r"sechzehn": "sixteen",
    r"mit": "with", r"auf": "on", r"bei": "at", r"schritten?": "steps", r"(?:die |das |der )?neue[rsn]?": "new",
    r"ende(?:te|t)(?: bei)?|erreicht\w*": "ended at", r"gesamt": "total", r"schritt": "step", r"zeit": "time",
    r"epoche": "epoch", r"faktor": "factor", r"parallele": "parallel", r"starke": "strong", r"schwache": "weak",
    r"skalierung": "scaling", r"beträgt|betrug|betragen|war|waren|ist|sind|lag|lagen": "is", r"nur": "only",
    r"letzte[rns]? (?:wert|zahl|eintrag)|(?:die |der |den )?untere[rn]?(?: zeile| wert| zahl)?": "last row",
    r"(?:die |der |den )?(?:beiden |zwei )oberen(?: zeilen| werte)?": "first two rows",
    r"(?:die |der |den )?obere[rn]?(?: zeile| wert| zahl)?": "first row",
    r"(?:die|der|das) erste(?= noch| stammt| lief| wurde| ist| mit| auf)": "first row",
    r"(?:die|der|das) (?:zweite|letzte)(?= noch| stammt| lief| wurde| ist| mit| auf)": "last row",
    r"(?:vom|aus dem|von einem) alten": "of an old", r"verwendet\w*|nutzt\w*|benutzt\w*": "used",
    r"geplant\w*": "planned", r"zahlen": "numbers", r"werte": "values", r"diese[rsn]?": "these",
    r"noch nicht": "not yet", r"nicht": "not", r"wurden?": "were",
}  # fmt: skip
_OF_CHINESE = re.compile("|".join(f"({each})" for each in _CHINESE))
_IS_CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
_OF_GERMAN = re.compile(rf"(?i)\b(?:{'|'.join(f'({each})' for each in _GERMAN)})\b")
_IS_GERMAN = re.compile(
    r"(?i)\b(?:und|mit|bilder|proben|sequenzen|faktor|zeile|nur|nicht|wurden?|ist|der|die|das|auf|bei|je|durchsatz"
    r"|beschleunigung|genauigkeit|hochrechnung|messung|schätzung|prognose|knoten|verfahren|referenz|hochgerechnet"
    r"|geschätzt|erwartet|karten|gesamt|\w*(?:verlust|effizienz|zeit|größe|länge)|pro (?:gpu|karte|schritt))\b"
)
_MEANT = {_OF_CHINESE: tuple(_CHINESE.values()), _OF_GERMAN: tuple(_GERMAN.values())}
_CARDS = re.compile(r"(?<=[\d一二两三四八]) ?(?:[张块台] ?)?(?:GPU ?)?卡|(?<=[单双])卡")
_NODES = re.compile(r"(?<=[\d一二两三四八单双]) ?台?机(?!器)")
_DIGITS = {"一": "1", "单": "1", "二": "2", "两": "2", "双": "2", "三": "3", "四": "4", "八": "8"}


def english(text: str) -> str:
    """Return a text with the German and Chinese words of measurements in English; other words stay."""
    if _IS_CHINESE.search(text):
        text = re.sub(
            r"(?<=[\u4e00-\u9fff\d])([,;])(?=[\u4e00-\u9fffA-Za-z])|(?<=[\u4e00-\u9fff])([,;])", r"\1\2 ", text
        )
        text = re.sub(r"[单每]卡(吞吐[量率]?)", r"\1 per gpu ", re.sub("单卡(?=批|batch)", "每卡", text))
        text = re.sub("十六(?=[张块台]?[卡机])", "16", text.translate(_SIGNS))
        text = _NODES.sub(" nodes, ", _CARDS.sub(" gpus ", text))
        text = re.sub(r"[一单二两双三四八](?= (?:gpus|nodes))", lambda found: _DIGITS[found[0]], text)
        text = _put(_OF_CHINESE, text)
        text = re.sub(r"(?<=[\u4e00-\u9fff])(?=[A-Za-z\d])|(?<=[A-Za-z\d%])(?=[\u4e00-\u9fff])", " ", text)
        text = re.sub(r" {2,}", " ", text).strip()
    if _IS_GERMAN.search(text):
        text = re.sub(r"(?<![\d.,])(\d{1,3}),(\d{1,2})(?![\d,])", r"\1.\2", text)
        text = _put(_OF_GERMAN, text)
    return text


def _put(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda found: _MEANT[pattern][(found.lastindex or 1) - 1], text)
